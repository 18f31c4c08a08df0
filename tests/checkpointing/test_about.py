"""Each checkpoint says which code, configuration and data it is of; a resume names what changed since."""

from __future__ import annotations

import json
import logging
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from test_attach import compiled, small, train
from test_narrator import attached

import checkflow
from checkflow.about import About, Git, Run, git_of
from checkflow.cli import run
from checkflow.errors import InputError
from checkflow.jsonfile import digest_of
from checkflow.schedule import Schedule

CONFIG = {"lr": 0.01, "layers": [6, 8, 3]}


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return compiled(small)


def git(folder: Path, *command: str) -> str:
    names = ("-c", "user.name=a", "-c", "user.email=a@b")
    return subprocess.run(["git", *names, *command], cwd=folder, check=True, capture_output=True, text=True).stdout


def listed(store: Path, capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    capsys.readouterr()
    assert run(["list", str(store), "--json"]) == 0
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)["checkpoints"]
    return rows


def test_list_and_export_say_what_a_checkpoint_is_of(
    schedule: Schedule, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = torch.utils.data.TensorDataset(torch.zeros(4))
    loader: checkflow.ResumableLoader[Any] = checkflow.ResumableLoader(data, batch_size=2)
    training, store = small(), tmp_path / "store"
    with attached(training, schedule, store, loader=loader, config=CONFIG, dataset="digits-2") as ckpt:
        for _ in range(2):
            for _ in loader:
                training.iteration()
                ckpt.step()
    newest = listed(store, capsys)[0]
    assert newest["iteration"] == 4 and newest["epoch"] == 1 and newest["dataset"] == "digits-2"
    assert newest["config"] == CONFIG and newest["config_digest"] == digest_of(CONFIG) and newest["host"]
    assert newest["versions"]["torch"] == torch.__version__
    assert newest["versions"]["checkflow"] == checkflow.__version__
    assert run(["list", str(store)]) == 0
    assert f"epoch 1, {'git ' + Git(**newest['git']).__str__() + ', ' if newest['git'] else ''}config " in (
        capsys.readouterr().out
    )
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "all.pt")]) == 0
    commit = json.loads(torch.load(tmp_path / "all.pt", weights_only=True)["commit"])
    assert commit["about"]["config"] == CONFIG


def test_a_resume_names_what_changed(schedule: Schedule, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """One line, at INFO; and the same run again names nothing."""
    with attached(small(), schedule, tmp_path / "store", config=CONFIG, dataset="a") as ckpt:
        train(ckpt._training, ckpt, 2)
    told: list[checkflow.Event] = []
    options: dict[str, Any]
    for options, expected in (
        ({"config": CONFIG | {"lr": 0.02}, "dataset": "b"}, ("config: lr 0.01 -> 0.02", "dataset a -> b")),
        ({"config": CONFIG, "dataset": "a"}, ()),
        ({}, ()),
    ):
        told.clear()
        with (
            caplog.at_level(logging.INFO, "checkflow"),
            attached(small(), schedule, tmp_path / "store", on_event=told.append, **options) as ckpt,
        ):
            ckpt.restore()
        (resumed,) = [event for event in told if isinstance(event, checkflow.Resumed)]
        assert resumed.changed == expected
        assert ("changed since" in str(resumed)) == bool(expected)


def test_git_is_read_where_there_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert git_of(tmp_path) is None
    git(tmp_path, "init", "-q")
    assert git_of(tmp_path) is None  # no commit yet
    (tmp_path / "train.py").write_text("1")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    sha = git(tmp_path, "rev-parse", "HEAD").strip()
    (tmp_path / "notes").write_text("not tracked")
    assert git_of(tmp_path) == Git(sha=sha, dirty=False)
    (tmp_path / "train.py").write_text("2")
    assert git_of(tmp_path) == Git(sha=sha, dirty=True)
    assert Run(folder=tmp_path).about(wait_s=60).git == Git(sha=sha, dirty=True)
    monkeypatch.setenv("PATH", "")
    assert git_of(tmp_path) is None


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"config": {"path": Path()}}, "config: is no JSON"),
        ({"config": float("nan")}, "config: is no JSON"),
        ({"config": "x" * 2**20}, "config: is 1048578 bytes of JSON"),
        ({"dataset": 3}, "dataset: is a int"),
    ],
)
def test_what_cannot_be_kept_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=f"^{message}"):
        Run(**options)


def test_checkpoints_of_before_say_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the first version are listed as they were."""
    (row,) = listed(Path(__file__).parent / "version_1" / "store", capsys)
    assert row["git"] is row["config"] is row["epoch"] is None and "torch" in row["versions"]
    assert About() == About.model_validate_json("{}")
