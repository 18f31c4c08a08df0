"""The command line. One file a command; nobody imports it.

Exit codes: 0 done, 1 infeasible or a failed verification, 2 bad input, 130 interrupted, 143 terminated. Bad input gets
one line on standard error. CHECKFLOW_DEBUG=1 shows the traceback of an internal error.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import os
import signal
import sys
from pathlib import Path
from types import FrameType

import click

from checkflow.cli import _streams
from checkflow.collector import paused_collector, process_ends
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE, CheckflowError, internal
from checkflow.missing import not_installed
from checkflow.text import plain
from checkflow.workdir import check_working_directory

EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143
EXIT_INTERNAL = 70  # sysexits' EX_SOFTWARE


class _Commands(click.Group):
    """Commands found by their file's name and imported when they run; --help reads their files and needs no torch."""

    def list_commands(self, ctx: click.Context) -> list[str]:  # noqa: ARG002
        return sorted(path.stem for path in Path(__file__).parent.glob("[a-z]*.py"))

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self.list_commands(ctx):
            return None
        with paused_collector():
            command = importlib.import_module(f"checkflow.cli.{cmd_name}").command
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        names = self.list_commands(ctx)
        limit = formatter.width - 6 - max(map(len, names))
        with formatter.section("Commands"):
            formatter.write_dl([(name, _described(name).get_short_help_str(limit)) for name in names])


def _described(name: str) -> click.Command:
    """A command that does nothing, with the docstring that the real one's file has."""
    module = ast.parse(Path(__file__).with_name(f"{name}.py").read_text(encoding="utf-8"))
    functions = (node for node in module.body if isinstance(node, ast.FunctionDef) and node.name == "command")
    return click.Command(name, help=next((ast.get_docstring(node) for node in functions), None))


@click.command(cls=_Commands, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="checkflow")
def _root() -> None:
    """Checkpoint PyTorch training every iteration: compile a training script to a proven schedule."""


def main() -> None:
    """Entry point of the `checkflow` command."""
    signal.signal(signal.SIGTERM, _terminated)
    _streams.prepare()
    if "_CHECKFLOW_COMPLETE" in os.environ:  # a shell asks how a line goes on
        _root.main(prog_name="checkflow")
    status = run(sys.argv[1:])
    process_ends()
    sys.exit(status)


class _Terminated(KeyboardInterrupt):
    """SIGTERM ends a command as Ctrl-C does: solvers' processes and temporary folders go with it."""


def _terminated(_number: int, _frame: FrameType | None) -> None:
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # a second one does not wait
    raise _Terminated


def exit_code_of(interrupt: KeyboardInterrupt) -> int:
    """Which of the two it was."""
    return EXIT_TERMINATED if isinstance(interrupt, _Terminated) else EXIT_INTERRUPTED


def run(arguments: list[str]) -> int:
    """Run one command line and return its exit code."""
    try:
        return _done(arguments)
    except CheckflowError as error:
        return _complain(str(error), error.exit_code)
    except click.ClickException as error:
        return _complain(error.format_message(), EXIT_BAD_INPUT)
    except KeyboardInterrupt as interrupt:
        click.echo(err=True)  # a terminal has ^C there
        return _complain("interrupted; nothing was left half-written", exit_code_of(interrupt))
    except _streams.UnwritableError as error:
        return EXIT_DONE if error.is_left else _complain(str(error), EXIT_BAD_INPUT)
    except Exception as error:  # the last resort: a bug must not end in a traceback
        if line := not_installed(error):
            return _complain(line, EXIT_BAD_INPUT)
        if os.environ.get("CHECKFLOW_DEBUG"):
            raise
        return _complain(f"{internal(error)}; CHECKFLOW_DEBUG=1 shows more", EXIT_INTERNAL)


def _done(arguments: list[str]) -> int:
    """As click's own main does it, which ends the process where a pipe is closed, and hides which signal came."""
    check_working_directory()  # torch's libraries end the process where it was removed
    try:
        with _root.make_context("checkflow", [*arguments]) as context:
            return int(_root.invoke(context) or EXIT_DONE)
    except click.exceptions.Exit as done:  # of --help and --version
        return done.exit_code
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message())
        return EXIT_BAD_INPUT


def _complain(message: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nobody reads it: the code says it
        click.echo("checkflow: " + plain(message), err=True)
    return code
