"""What users read is true: programs run, output is what commands print, quoted errors exist, and the site builds."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
from pages import FAILURES, PAGES, ROOT, Output, draw_failures, outputs, programs

from checkflow.cli import run

HOWTOS = sorted((ROOT / "docs" / "howto").glob("*.md"))
SHOWING = {
    "README.md": [["demo"]],
    "commands.md": [["compile", "alexnet"], ["compile", "bert"], ["simulate", "--iteration"]],
}
SHORTER = {"checkflow demo": "checkflow demo --iterations 4"}  # prints the same but for numbers


@pytest.mark.parametrize("block", outputs(), ids=str)
def test_output_is_what_the_command_prints(block: Output, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the letter, but for the time that it took. `python tests/docs/pages.py` writes it anew."""
    monkeypatch.chdir(tmp_path)
    now = block.made(SHORTER.get(block.command))
    assert block.comparable(block.text) == block.comparable(now)


def test_pages_show_output() -> None:
    """The blocks are found: a kill in the README, a plan and a refusal among the commands."""
    shown = {name: [block.command.split()[1:3] for block in outputs() if block.page.name == name] for name in SHOWING}
    assert shown == SHOWING


@pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")  # torchdata 0.11 on torch 2.13
@pytest.mark.parametrize("page", HOWTOS, ids=lambda page: page.stem)
def test_how_tos_run(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is a program that checks what the page says."""
    for library in ("accelerate", "lightning", "torchtitan", "transformers"):
        if library in programs(page):
            pytest.importorskip(library)
    monkeypatch.chdir(tmp_path)
    program = programs(page)
    assert "assert" in program
    for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "localhost", "MASTER_PORT": "0"}.items():
        monkeypatch.setenv(name, value)  # as torchrun starts a job of one
    with warnings.catch_warnings():
        if "lightning" in program:  # it warns of its own dependencies
            warnings.simplefilter("ignore")
        exec(compile(program, str(page), "exec"), {"__name__": "howto"})


def test_the_picture_of_failures_is_what_the_command_draws(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`python tests/docs/pages.py simulate` draws it anew. Its text is compared; paths differ between matplotlibs."""
    monkeypatch.chdir(ROOT)
    drawn = tmp_path / "waste.svg"
    assert draw_failures(drawn) == 0
    now, shown = (re.findall("<!-- (.+?) -->", path.read_text()) for path in (drawn, FAILURES))
    assert now == shown and {"checkflow, every 2", "checkfreq, every 1"} <= set(now)


def test_the_quickstart_survives_a_kill(tmp_path: Path) -> None:
    """README's script as a new user runs it: train, kill -9, train on."""
    (tmp_path / "train.py").write_text(programs(ROOT / "README.md"))
    train = [sys.executable, "-u", "train.py"]
    with subprocess.Popen(train, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stderr is not None
        for line in process.stdout:
            if line.startswith("epoch 1"):
                process.kill()
                break
        told = process.stderr.read()
    assert "a checkpoint every iteration" in told
    again = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    resumed = re.search(r"resumed iteration (\d+)", again.stderr)
    assert resumed is not None and int(resumed[1]) >= 20, again.stderr
    assert "epoch 0" not in again.stdout and "epoch 3" in again.stdout
    ended = subprocess.run(train, cwd=tmp_path, capture_output=True, text=True)
    assert ended.stdout == "epoch 19 ended\n", "as the tutorial says of a run that is started after its end"


def _until(command: list[str], folder: Path, last: str) -> list[str]:
    """What a program tells until a line has this, without numbers; then it is killed."""
    told = []
    with subprocess.Popen(command, cwd=folder, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        for line in process.stderr:
            told.append(re.sub(r"\d+(\.\d+)?", "#", line.strip()))
            if last in line:
                break
        process.kill()
    return told


def test_the_tutorial_shows_what_both_runs_say(tmp_path: Path) -> None:
    """The first until it has learned, the second until it resumed."""
    (tmp_path / "train.py").write_text(programs(ROOT / "README.md").replace(", 20)", ", 1000)"))
    page = (ROOT / "docs" / "tutorial.md").read_text()
    shown = re.sub(r"\d+(\.\d+)?", "#", "\n".join(re.findall(r"^    (checkflow: .*)$", page, re.MULTILINE))).split("\n")
    train = [sys.executable, "-u", "train.py"]
    told = _until(train, tmp_path, "learned its schedule") + _until(train, tmp_path, "resumed")
    assert [line.partition(": a checkpoint every iteration adds")[0] for line in told] == [
        line.partition(": a checkpoint every iteration adds")[0] for line in shown
    ]


@pytest.mark.parametrize(("link", "interval", "added"), [("63GB/s", 2, "no byte"), ("25.2GB/s", 4, "189 MiB")])
def test_the_figures_of_parts_are_those_of_the_command(
    link: str, interval: int, added: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """AlexNet's in guide.md, over the paper's link and over the card's own."""
    page = _plain((ROOT / "docs" / "guide.md").read_text())
    command = re.search(r"`checkflow (compile alexnet [^`]+)`", page)
    assert command is not None and f"adds {added}" in page and f"{interval}" in page
    arguments = [link if word == "63GB/s" else word for word in command[1].split()]
    assert run([*arguments, "-o", str(tmp_path / "schedule.json"), "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    more = said["peak_bytes"] - said["training_peak_bytes"]
    assert (said["interval"], f"{more / 2**20:.0f} MiB" if more else "no byte") == (interval, added)


def test_the_tutorial_is_the_quickstart_s_script() -> None:
    """One script, of which the tutorial explains each part."""
    one, other = (programs(page).split("\n") for page in (ROOT / "docs" / "tutorial.md", ROOT / "README.md"))
    assert list(filter(None, one)) == list(filter(None, other))


def test_the_tutorial_compiles_that_script_ahead(tmp_path: Path) -> None:
    """With the function that it adds, by the command that it gives; training then follows that schedule."""
    page = (ROOT / "docs" / "tutorial.md").read_text()
    added = re.search(r"^(    def training\(.*?)\n\n(?!    )", page, re.MULTILINE | re.DOTALL)
    command = re.search(r"^    checkflow (compile train.py .*)$", page, re.MULTILINE)
    assert added is not None and command is not None
    script, start = programs(ROOT / "README.md"), 'if __name__ == "__main__":'
    script = script.replace(start, textwrap.dedent(added[1]) + "\n\n\n" + start)
    script = script.replace("attach(model, optimizer,", 'attach(model, optimizer, schedule="schedule.json",')
    (tmp_path / "train.py").write_text(script)
    for arguments in (["-c", "from checkflow.cli import main; main()", *command[1].split()], ["train.py"]):
        ran = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True)
        assert ran.returncode == 0, ran.stderr
    assert "learns its schedule" not in ran.stderr


_TRAINS = """
import os, pathlib, signal, sys, time
if "fails" in os.listdir():
    sys.exit(3)
if "killed" not in os.listdir():
    pathlib.Path("killed").touch()
    os.kill(os.getpid(), signal.SIGKILL)

def save(*_):
    time.sleep(0.3)
    pathlib.Path("saved").touch()
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    os.kill(os.getpid(), signal.SIGTERM)

signal.signal(signal.SIGTERM, save)
pathlib.Path("again").touch()
for _ in range(300):
    time.sleep(0.1)
"""


def test_a_container_s_entry_trains_on_after_a_kill_and_waits_for_the_last_checkpoint(tmp_path: Path) -> None:
    """entry.sh of failures.md: a killed trainer is started again, SIGTERM reaches it, and its own failure is told."""
    page = (ROOT / "docs" / "howto" / "failures.md").read_text()
    script = re.search(r"^(    trap .*?)\n\n(?!    )", page, re.MULTILINE | re.DOTALL)
    assert script is not None
    loop = re.search(r"^    until .*?^    wait .*?$", script[1], re.MULTILINE | re.DOTALL)
    slurm = (ROOT / "docs" / "howto" / "first-day.md").read_text()
    assert loop is not None and re.sub(" +#.*", "", loop[0]) in slurm, "a batch job's is the same"
    (tmp_path / "entry.sh").write_text(textwrap.dedent(script[1]) + "\n")
    (tmp_path / "train.py").write_text(_TRAINS)
    (tmp_path / "python").symlink_to(sys.executable)
    environment = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    with subprocess.Popen(["bash", "entry.sh"], cwd=tmp_path, env=environment) as shell:
        until = time.monotonic() + 60
        while not (tmp_path / "again").exists() and time.monotonic() < until:
            time.sleep(0.05)
        shell.terminate()
        shell.wait(60)
    assert (tmp_path / "saved").exists()
    (tmp_path / "fails").touch()
    assert subprocess.run(["bash", "entry.sh"], cwd=tmp_path, env=environment).returncode == 3


def _plain(text: str) -> str:
    return " ".join(text.split())


def test_quoted_errors_exist() -> None:
    """Each text under which troubleshooting.md explains an error stands in the source; "…" is what differs."""
    page = (ROOT / "docs" / "troubleshooting.md").read_text()
    quoted = re.findall(r"^### `(.+)`$", page, re.MULTILINE)
    assert len(quoted) >= 15
    # adjacent literals are one text, and what is formatted in is …
    source = _plain(" ".join(path.read_text() for path in sorted((ROOT / "checkflow").rglob("*.py"))))
    source = re.sub(r"\{[^{}]*\}", "…", re.sub(r"\" f?\"|' f?'", "", source))
    for text in quoted:
        pieces = [re.escape(piece.strip()) for piece in text.split("…") if piece.strip()]
        assert re.search(".{0,200}?".join(pieces), source), f"{text}: is nowhere in checkflow/"


def test_the_site_builds(tmp_path: Path) -> None:
    """Offline; a warning is an error: a page that no menu shows, a link or an anchor that leads nowhere."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")]
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    reference = (tmp_path / "site" / "reference" / "index.html").read_text()
    import checkflow

    missing = [name for name in checkflow.__all__ if name != "__version__" and f">{name}<" not in reference]
    assert not missing
    loaded = [
        link
        for page in (tmp_path / "site").rglob("*.html")
        for link in re.findall(r'<(?:script|link)[^>]*(?:src|href)="(https?://[^"]+)', page.read_text())
    ]
    assert not loaded, "a page loads nothing from elsewhere"


def test_pages_import_from_checkflow_itself() -> None:
    """Nobody learns a module's path from a page, but an integration's, of which a page uses what is public."""
    for page in PAGES:
        nodes = ast.walk(ast.parse(programs(page)))
        for node in (node for node in nodes if isinstance(node, ast.ImportFrom | ast.Import)):
            module = node.module or "" if isinstance(node, ast.ImportFrom) else ""
            names = {alias.name for alias in node.names}
            integration = re.fullmatch(r"checkflow\.integrations\.(\w+)", module)
            if integration is not None:
                assert names <= public(ROOT / "checkflow" / "integrations" / f"{integration[1]}.py"), page.name
            else:
                assert not any(name.startswith("checkflow.") for name in (module, *names)), f"{page.name}: {names}"


def public(module: Path) -> set[str]:
    """A module's `__all__`, without what importing it needs."""
    for node in ast.parse(module.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_the_walks_name_what_is_there() -> None:
    """Each file that architecture.md names exists, and each name after it stands in that file."""
    page = (ROOT / "docs" / "architecture.md").read_text()
    walks = _plain(page.partition("## Three walks")[2])
    named = re.findall(r"`(checkflow/[\w/]+\.py)`(?: `(\w+)`)?", walks)
    named += [(path, name) for name, path in re.findall(r"`(?:\w+\.)?(\w+)` (?:of|in) `(checkflow/[\w/]+\.py)`", walks)]
    assert len(named) > 20
    for path, name in named:
        assert (ROOT / path).is_file(), f"{path} is not there"
        defined = re.findall(r"^\s*(?:def|class) (\w+)", (ROOT / path).read_text(), re.MULTILINE)
        assert not name or name in defined, (path, name)
    table = page.partition("## The tree")[2].partition("## Three walks")[0]
    for row in re.findall(r"^\| (`[^|]+`) \|", table, re.MULTILINE):
        for part in re.findall(r"`([\w/.]+)`", row):
            assert (ROOT / "checkflow" / part).exists(), f"{part} is not there"
    parts = {path.name for path in (ROOT / "checkflow").iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert parts <= {part.rstrip("/") for part in re.findall(r"`([\w.]+/)`", table)} | {"examples"}
