"""Standard output and error that are closed, full, read by nobody, or in an encoding without the picture's letters."""

from __future__ import annotations

import codecs
import io
import json
import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from checkflow.cli import _streams

GRAPH = Path(__file__).parents[2] / "graphs" / "alexnet-1.json"
HELP, LIST, WRONG = "--help", "list empty", "verify there.json is.json"
SHOW, JSON = ("compile g.json --bandwidth 63GB/s -o s.json" + more for more in ("", " --json"))


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    shutil.copy(GRAPH, "g.json")
    Path("empty").mkdir()


def shell(arguments: str, around: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """A command line in a shell, with what stands around it there."""
    command = shlex.join([sys.executable, "-c", "from checkflow.cli import main; main()"]) + f" {arguments}"
    return subprocess.run(
        ["bash", "-o", "pipefail", "-c", around.format(command)],
        check=False,
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": ":".join(sys.path)} | environment,
    )


def complaints(process: subprocess.CompletedProcess[str]) -> list[str]:
    """What stands on standard error, without progress."""
    steps = ("planning", "moving", "verifying", "writing")
    return [line for line in process.stderr.splitlines() if not line.removeprefix("checkflow: ").startswith(steps)]


@pytest.mark.parametrize("arguments", [HELP, LIST, SHOW, JSON, "inspect g.json --rows 0", ""])
def test_a_reader_that_leaves_is_no_failure(arguments: str) -> None:
    """As `head` does, after nothing or a line; what was to be written is."""
    process = shell(arguments, "{} | true")
    assert (process.returncode, complaints(process)) == (0, [])
    assert Path("s.json").exists() == ("s.json" in arguments)


def test_who_reads_progress_may_leave() -> None:
    """The work goes on, and its answer stands on standard output."""
    process = shell(JSON, "{{ {} 2>&3 | cat >answer; }} 3>&1 | true")
    assert process.returncode == 0
    assert Path("answer").read_text().startswith("{") and Path("s.json").exists()


@pytest.mark.parametrize("arguments", [HELP, LIST, SHOW, JSON])
def test_a_full_disk_under_standard_output_is_one_line(arguments: str) -> None:
    """With the code of what is wrong outside of checkflow, and no word of Python's when it ends."""
    process = shell(arguments, "{} >/dev/full")
    assert process.returncode == 2
    (line,) = complaints(process)
    assert line == (
        "checkflow: standard output: cannot be written (No space left on device); free space, or send it elsewhere"
    )


@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("arguments", "code"), [(HELP, 0), (LIST, 0), (SHOW, 0), (WRONG, 2)])
def test_a_closed_stream_is_an_empty_one(arguments: str, code: int, closed: str) -> None:
    """The command does what it is for, and no file that it opens is taken for the stream."""
    process = shell(arguments, "{} " + closed)
    assert process.returncode == code
    assert all("internal" not in line and "Traceback" not in line for line in complaints(process))
    if arguments == SHOW:
        assert Path("s.json").read_text().startswith('{\n "format": "checkflow-schedule"')


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8:strict"])
def test_an_encoding_of_few_letters_gets_others_for_the_rest(encoding: str) -> None:
    """The picture's bars are no reason to fail, nor is a path that is no text."""
    process = shell(SHOW, "{}", PYTHONIOENCODING=encoding)
    assert process.returncode == 0 and "schedule: s.json" in process.stdout
    process = shell("trace $'bad\\xff.py' -o t.json", "{}", PYTHONIOENCODING=encoding)
    assert process.returncode == 2 and "bad\\xff.py: no such file" in process.stderr
    Path("s.json").rename(os.fsdecode(b"bad\xff.json"))
    process = shell("inspect $'bad\\xff.json'", "{}", PYTHONIOENCODING=encoding)
    assert process.returncode == 0


def test_a_locale_of_few_letters_gets_others_for_the_rest() -> None:
    """LC_ALL=C without UTF-8 mode, in which Python's streams escape what is no text, and no other letter."""
    process = shell(SHOW, "{}", LC_ALL="C", PYTHONUTF8="0")
    assert process.returncode == 0 and "schedule: s.json" in process.stdout, process.stderr


ENCODINGS = ("ascii", "latin-1", "cp1252", "cp037", "shift_jis", "gb18030", "utf-8", "utf-16")
HANDLERS = ("strict", "surrogateescape", "surrogatepass", "ignore", "replace", "backslashreplace", "xmlcharrefreplace",
            "namereplace", "a program's own")  # fmt: skip


@pytest.mark.parametrize("errors", HANDLERS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_no_letter_fails_in_any_encoding_under_any_handler(
    encoding: str, errors: str, monkeypatch: pytest.MonkeyPatch, capfdbinary: pytest.CaptureFixture[bytes]
) -> None:
    """What can be encoded is there; bytes of a path that are no text pass where they did."""
    codecs.register_error("a program's own", codecs.strict_errors)
    for name in ("stdout", "stderr"):
        monkeypatch.setattr(sys, name, io.TextIOWrapper(io.BytesIO(), encoding=encoding, errors=errors))
    _streams.prepare()
    for stream in (sys.stdout, sys.stderr):
        stream.write("a\udcff \u2588 \U0001f680 \ud800 z")
        stream.flush()
    written = capfdbinary.readouterr().out
    assert written.startswith("a".encode(encoding)) and written.decode(encoding, "replace").endswith(" z")
    passes = errors == "surrogateescape" and encoding != "utf-16"
    assert written.startswith("a".encode(encoding) + b"\xff") == passes


def test_an_interrupt_is_told_in_one_line_from_the_first_import_on() -> None:
    """Ctrl-C while click is imported."""
    Path("click.py").write_text("import os, signal, time; os.kill(os.getpid(), signal.SIGINT); time.sleep(9)")
    command = [sys.executable, "-m", "checkflow", "--help"]
    environment = os.environ | {"PYTHONPATH": ":".join([str(Path().resolve()), *sys.path])}
    process = subprocess.run(command, check=False, capture_output=True, text=True, env=environment)
    assert process.returncode == 130 and process.stdout == ""
    assert process.stderr == "\ncheckflow: interrupted; nothing was left half-written\n"


def test_a_shell_is_told_how_a_line_goes_on() -> None:
    """By click, which asks for it by this variable."""
    process = shell("", "{}", _CHECKFLOW_COMPLETE="bash_source")
    assert process.returncode == 0 and "_CHECKFLOW_COMPLETE=bash_complete" in process.stdout


PRINTS = """
import subprocess
import torch
import checkflow

subprocess.run("echo printed by a program", shell=True)
print("printed by the file")


def training():
    print("printed by the function")
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())

    def iteration():
        optimizer.zero_grad()
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()

    return checkflow.Training(model, optimizer, iteration)
"""


@pytest.mark.parametrize("command", ["trace net.py -o g.json", "compile net.py -o s.json", "sweep net.py --jobs 1"])
def test_what_a_model_file_and_its_programs_print_is_no_part_of_the_answer(command: str) -> None:
    Path("net.py").write_text(PRINTS)
    process = shell(f"{command} --json", "{}")
    assert process.returncode == 0, process.stderr
    assert json.loads(process.stdout)
    assert "printed by" not in process.stdout
