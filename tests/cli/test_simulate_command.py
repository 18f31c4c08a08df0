"""checkflow simulate from end to end."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from checkflow.cli import run
from checkflow.errors import EXIT_BAD_INPUT, EXIT_DONE

SCHEDULES = Path(__file__).parents[2] / "schedules"
VIT, VGG = (str(SCHEDULES / f"{name}-32.json") for name in ("vit", "vgg"))
FLAGS = ["--iteration", "445ms", "--state", "16GB", "--bandwidth", "12GB/s"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _cells(capfd: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, object]]:
    capfd.readouterr()
    assert run(["simulate", *arguments, "--json"]) == EXIT_DONE
    cells = json.loads(capfd.readouterr().out)["cells"]
    assert isinstance(cells, list)
    return cells


def _number(value: object, *path: str) -> float:
    for key in path:
        assert isinstance(value, dict)
        value = value[key]
    assert isinstance(value, float | int)
    return value


def test_schedules_stand_side_by_side_from_one_device_to_many(capfd: pytest.CaptureFixture[str]) -> None:
    """More devices fail more often and waste more; the parts add up; the same seed says the same."""
    asked = (VIT, VGG, "--mtbf", "2000h", "--devices", "1..16384", "--days", "3", "--seeds", "6")
    cells = _cells(capfd, *asked)
    assert [cell["devices"] for cell in cells[::2]] == [2**n for n in range(15)]
    one, most = cells[0], cells[-2]
    assert _number(one, "wasted", "median") < _number(most, "wasted", "median") < 1
    for cell in cells:
        assert _number(cell, "effective", "low") <= _number(cell, "effective", "median")
        assert _number(cell, "effective", "median") <= _number(cell, "effective", "high")
    assert _cells(capfd, *asked) == cells
    assert _cells(capfd, *asked, "--seed", "1") != cells


def test_intervals_are_compared_without_a_schedule(capfd: pytest.CaptureFixture[str]) -> None:
    """A stall at each iteration wastes two thirds of the time; GoCkpt's N* for it far less."""
    each, best = _cells(
        capfd, *FLAGS, "--interval", "1,77", "--stall", "988ms", "--mtbf", "10min", "--days", "1", "--restart", "0s",
        "--replace", "0s",
    )  # fmt: skip
    assert _number(each, "shares", "stall") == pytest.approx(988 / (988 + 445), abs=0.02)
    assert 0 < _number(best, "wasted", "median") < 0.2


def test_the_table_and_the_picture(capfd: pytest.CaptureFixture[str]) -> None:
    """Each policy has its line, each rate of failures is named once, and both kinds of picture are drawn."""
    for name in ("waste.png", "waste.svg"):
        asked = ["simulate", VIT, VGG, "--mtbf", "2000h", "--devices", "64,1024", "--seeds", "6", "--figure", name]
        assert run(asked) == EXIT_DONE
        out = capfd.readouterr().out
        assert out.count("vit-32: checkflow, every 1") == out.count("vgg-32: checkflow, every 1") == 2
        assert out.count("1.3 d") == out.count("2.0 h") == 1
    assert Path("waste.png").stat().st_size > 10_000
    assert "mean time between failures" in Path("waste.svg").read_text()


def test_failures_come_from_a_file(capfd: pytest.CaptureFixture[str]) -> None:
    """One run, with those that fall into the days; a lost machine costs what is newer than the disk's."""
    Path("failed.csv").write_text("time_s,loss\n3600,trainer\n7200,machine\n999999,machine\n")
    (cell,) = _cells(capfd, VIT, "--failures", "failed.csv", "--days", "1")
    assert cell["failures"] == {"trainer": 1, "machine": 1}
    assert _number(cell, "redone_per_failure", "trainer") <= 1 < _number(cell, "redone_per_failure", "machine") < 400


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([VIT], "--mtbf, --failures: give one"),
        ([VIT, "--mtbf", "3"], "--mtbf: '3' is not a time; write it like 3h"),
        ([VIT, "--mtbf", "0h"], "--mtbf 0h: is not positive"),
        ([VIT, "--mtbf", "3h", "--failures", "a.csv"], "give one of them"),
        ([VIT, "--failures", "none.csv"], "none.csv: cannot be read"),
        ([VIT, "--failures", "none.csv", "--figure", "f.png"], "--figure: has the mean time"),
        ([VIT, "--failures", "/dev/null"], "/dev/null: is a device; give a file"),
        ([VIT, "--failures", "a.csv", "--devices", "4"], "--failures says what fails; leave it out"),
        ([VIT, "--failures", "a.csv", "--lost-machines", "0.5"], "--failures says what fails; leave it out"),
        ([VIT, "--failures", "a.csv", "--seeds", "3"], "--failures says what fails; leave it out"),
        ([VIT, "--failures", "a.csv", "--seed", "0"], "--failures says what fails; leave it out"),
        (["--iteration", "0s", *FLAGS[2:], "--mtbf", "3h"], "--iteration 0s: is not positive; write it like"),
        (["--mtbf", "3h"], "SCHEDULE: none is given"),
        ([VIT, "--mtbf", "3h", "--interval", "2"], "a SCHEDULE says it"),
        ([VIT, "--mtbf", "3h", "--devices", "8..2"], "--devices 8..2: give a range that ascends"),
        ([VIT, "--mtbf", "3h", "--devices", "1.."], "--devices 1..: a range lacks an end; write it like 1..16384"),
        ([VIT, "--mtbf", "3h", "--figure", "f.gif"], "f.gif: its name has to end in .png or .svg"),
        ([VIT, VIT, "--mtbf", "3h"], "give each once, or rename one"),
        ([*FLAGS, "--mtbf", "3h", "--interval", "0"], "--interval 0: is not a positive whole number"),
        ([VIT, "--mtbf", "3h", "--persist-every", "often"], "--persist-every: 'often' is not a time"),
        ([VIT, "--mtbf", "3h", "--days", "nan"], "--days nan: is not above 0"),
        ([VIT, "--mtbf", "3h", "--lost-machines", "nan"], "--lost-machines nan: is not in"),
        (["no.json", "--mtbf", "3h"], "no.json"),
        ([VIT, "--mtbf", "9" * 400 + "h"], "is out of range; write it like 3h"),
        ([VIT, "--mtbf", "\u0663h"], "is not a time; write it like 3h"),
        ([VIT, "--mtbf", "3h", "--devices", "9" * 5000], "is more than 1000000000; write it like 8"),
        ([*FLAGS, "--mtbf", "3h", "--interval", "9" * 5000], "is more than 1000000000; write it like 8"),
        ([*FLAGS, "--mtbf", "3h", "--interval", ""], "--interval '': a value is missing"),
        ([*FLAGS, "--mtbf", "3h", "--interval", "\u0663"], "is not a positive whole number"),
    ],
)
def test_bad_input_is_one_line(arguments: list[str], says: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Which names the argument and says what to write."""
    assert run(["simulate", *arguments]) == EXIT_BAD_INPUT
    err = capfd.readouterr().err
    assert says in err and err.count("\n") == 1
