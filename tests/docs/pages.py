"""The pages that users read, and what stands in them: programs, and what commands print.

A block of output is preceded by <!-- made by: COMMAND -->, and by "; numbers differ" where they do from run to run.
`python tests/docs/pages.py` runs each COMMAND and writes what it prints into the page; with words after it, those whose
COMMAND has one of them.
"""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from checkflow.cli import run

ROOT = Path(__file__).parent.parent.parent
PAGES = (ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md")))
FAILURES = ROOT / "docs" / "howto" / "simulate.svg"
_MADE = re.compile(
    r"<!-- made by: (?P<command>[^;\n]+)(?P<masked>; numbers differ)?(?:; last (?P<last>\d+) lines)? -->\n+"
    r"```\n(?P<text>.*?)\n```",
    re.DOTALL,
)


@dataclass(frozen=True, slots=True)
class Output:
    """A block of a page, and the command that prints it."""

    page: Path
    command: str
    masked: bool  # numbers are not compared
    last: int | None  # how many of the last lines it has; None: all
    text: str
    start: int  # of the text, in the page

    def __str__(self) -> str:
        return f"{self.page.name}: {self.command}"

    def made(self, command: str | None = None) -> str:
        """What the command (or one that prints the same but for numbers) prints now."""
        lines = printed(command or self.command)
        return "\n".join(lines[-self.last :] if self.last else lines)

    def comparable(self, text: str) -> str:
        """Without what no two runs have in common."""
        return _NUMBER.sub("#", text) if self.masked else _TOOK.sub(lambda line: _NUMBER.sub("#", line[0]), text)


_NUMBER = re.compile(r"\d+(\.\d+)?")
_TOOK = re.compile(r"^took .*$", re.MULTILINE)


def outputs() -> list[Output]:
    """All blocks of output in all pages."""
    return [
        Output(page, found["command"], bool(found["masked"]), int(found["last"] or 0) or None, found["text"],
               found.start("text"))
        for page in PAGES
        for found in _MADE.finditer(page.read_text())
    ]  # fmt: skip


def printed(command: str) -> list[str]:
    """The lines of a command on standard output; of one that is refused, that which says why."""
    name, *arguments = shlex.split(command)
    assert name == "checkflow"
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = run(arguments)
    lines = [line.rstrip() for line in (out.getvalue().splitlines() if code == 0 else err.getvalue().splitlines()[-1:])]
    while lines and not lines[-1]:
        lines.pop()
    return lines


def programs(page: Path) -> str:
    """The Python blocks of a page, as one program."""
    return "\n".join(re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL))


def draw_failures(path: Path) -> int:
    """The picture of howto/simulate.md, by the commands that it gives."""
    page = (ROOT / "docs" / "howto" / "simulate.md").read_text()
    commands = [shlex.split(line)[2:] for line in re.findall(r"^    \$ checkflow .*$", page, re.MULTILINE)]
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()):
        codes = [run([str(path) if argument == "waste.svg" else argument for argument in each]) for each in commands]
    return max(codes, default=1)


def main() -> None:
    if not sys.argv[1:] or "simulate" in sys.argv[1:]:
        draw_failures(FAILURES)
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
        for block in reversed(outputs()):  # from the end of a page, so that what is before stays where it is
            if sys.argv[1:] and not any(word in block.command for word in sys.argv[1:]):
                continue
            now = block.made()
            if block.comparable(now) != block.comparable(block.text):
                page = block.page.read_text()
                block.page.write_text(page[: block.start] + now + page[block.start + len(block.text) :])
                sys.stderr.write(f"{block}: written\n")


if __name__ == "__main__":
    main()
