"""checkflow list, check and export, as a person runs them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_store import SMALL, InProcess, fill, newest_whole

from checkflow.cli import run
from checkflow.store.both.lock import StoreLock
from checkflow.store.bucket.objects import BucketError, Objects


@pytest.fixture
def store(tmp_path: Path) -> Path:
    """Checkpoints of iterations 3 and 4; 3 is marked."""
    saver = InProcess(tmp_path / "store")
    saver.persist(3, keep=True)
    saver.persist(4)
    saver.close()
    return tmp_path / "store"


def break_newest(store: Path) -> None:
    path = store / "00000002-iteration-4" / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-1] + b"!")


def test_list(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Newest first, with what is marked."""
    assert run(["list", str(store)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].startswith("00000002-iteration-4")
    assert lines[2].startswith("00000001-iteration-3") and "retained for good" in lines[2]
    assert run(["list", str(store), "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["checkpoints"]
    assert [(row["iteration"], row["keep"]) for row in rows] == [(4, False), (3, True)]


def test_list_names_what_is_wrong(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (store / "00000002-iteration-4" / "manifest.json").write_text("{}")
    assert run(["list", str(store), "--json"]) == 0
    assert "is not of format" in json.loads(capsys.readouterr().out)["checkpoints"][0]["wrong"]
    assert run(["list", str(store)]) == 0


def test_an_empty_store(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["list", str(tmp_path)]) == 0
    assert run(["check", str(tmp_path)]) == 0
    assert capsys.readouterr().out.count("no checkpoint yet") == 2
    assert run(["export", str(tmp_path), "--to", "torch", "-o", str(tmp_path / "x")]) == 2


def test_a_directory_of_other_things_does_not_pass(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A path that is wrong is told; a store in which nothing was saved yet passes, beside what else is there."""
    (tmp_path / "train.py").touch()
    commands = ["check"], ["list"], ["list", "--json"], ["export", "--to", "torch", "-o", str(tmp_path / "whole.pt")]
    for command, *more in commands:
        assert run([command, str(tmp_path), *more]) == 2
        assert "is no store, it has no checkpoint and no file 'lock'" in capsys.readouterr().err
    (tmp_path / "lock").touch()
    for (command, *more), code in zip(commands, (0, 0, 0, 2), strict=True):
        assert run([command, str(tmp_path), *more]) == code
        said = capsys.readouterr()
        assert "no checkpoint yet" in said.out + said.err or "--json" in more


@pytest.mark.parametrize("command", ["list", "check", "export"])
def test_no_store_is_one_line(command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """No traceback, and nothing is made."""
    more = ["--to", "torch", "-o", str(tmp_path / "x")] if command == "export" else []
    assert run([command, str(tmp_path / "nowhere"), *more]) == 2
    assert "is no store" in capsys.readouterr().err.splitlines()[-1]
    if command == "check":
        assert run([command, str(tmp_path / "nowhere"), "--repair"]) == 2
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize("command", ["list", "check"])
def test_a_folder_as_a_bucket_has_no_credentials(
    command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What is wrong with it is its path, or a folder below it that nobody may read."""

    def refused(_: Objects) -> dict[str, int]:
        raise BucketError("Permission denied", is_refused=True)

    monkeypatch.setattr(Objects, "sizes", refused)
    for url, expected in ((f"file://{tmp_path}", "check its path"), ("s3://name/prefix", "and the credentials")):
        assert run([command, url]) == 2
        assert expected in capsys.readouterr().err


@pytest.mark.parametrize("command", ["list", "check", "export"])
def test_one_checkpoint_is_no_store(command: str, store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    more = ["--to", "torch", "-o", str(store.parent / "x")] if command == "export" else []
    assert run([command, str(store / "00000002-iteration-4"), *more]) == 2
    assert f"is one checkpoint of a store; give the store, {store}" in capsys.readouterr().err


def test_check(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """0 while all is well; 1, with the reason, once a byte is wrong; nothing is removed unasked."""
    (store / ".incomplete-00000003-iteration-5-1-1").mkdir()  # as a saver has it that writes
    assert run(["check", str(store)]) == 0
    assert "iteration-5-1-1: unfinished, of a saver that was killed or runs; harmless" in capsys.readouterr().out
    break_newest(store)
    assert run(["check", str(store)]) == 1
    assert "00000002-iteration-4: model.safetensors: bytes 0 to" in capsys.readouterr().out
    assert (store / "00000002-iteration-4").exists()


def test_repair_removes_what_does_not_verify_and_says_so(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_newest(store)
    (store / ".incomplete-00000003-iteration-5-1-1").mkdir()
    assert run(["check", str(store), "--repair", "--json"]) == 0
    captured = capsys.readouterr()
    assert "removing 00000002-iteration-4: model.safetensors: bytes 0 to" in captured.err
    assert [row["name"] for row in json.loads(captured.out)["wrong"]] == ["00000002-iteration-4"]
    assert sorted(path.name for path in store.iterdir()) == ["00000001-iteration-3", "lock"]
    assert newest_whole(store) == 3


def test_repair_never_leaves_the_store(store: Path, tmp_path: Path) -> None:
    """A link in a checkpoint's place is removed, not what it points to."""
    outside = tmp_path / "outside"
    shutil.copytree(store / "00000002-iteration-4", outside)
    shutil.rmtree(store / "00000002-iteration-4")
    (store / "00000002-iteration-4").symlink_to(outside)
    assert run(["check", str(store), "--repair"]) == 0
    assert not (store / "00000002-iteration-4").is_symlink()
    assert (outside / "manifest.json").exists()


def test_repair_removes_what_it_can(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A folder that somebody made in a checkpoint keeps that folder alone, by the path that it has by then."""
    break_newest(store)
    (store / "00000002-iteration-4" / "@eaDir").mkdir()
    leftovers = [store / f".incomplete-{name}" for name in "ab"]
    for each in leftovers:
        each.mkdir()
    (leftovers[0] / ".ipynb_checkpoints").mkdir()
    assert run(["check", str(store), "--repair"]) == 2
    hidden = store / ".pruned-00000002-iteration-4"
    within = store / ".pruned-.incomplete-a" / ".ipynb_checkpoints"
    lines = capsys.readouterr().err.splitlines()
    assert f"cannot be removed: {hidden / '@eaDir'}: Is a directory" in lines[-3]
    assert f"cannot be removed: {within}: Is a directory" in lines[-2]
    assert f"{store}: 2 could not be removed; remove what is in the way, and repeat this" in lines[-1]
    assert [path.name for path in hidden.iterdir()] == ["@eaDir"]
    assert not leftovers[1].exists() and newest_whole(store) == 3
    (hidden / "@eaDir").rmdir()
    within.rmdir()
    assert run(["check", str(store), "--repair"]) == 0
    assert sorted(path.name for path in store.iterdir()) == ["00000001-iteration-3", "lock"]


def test_repair_leaves_the_last_resort(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Where nothing verifies a person decides."""
    break_newest(store)
    (store / "00000001-iteration-3" / "commit.json").unlink()
    assert run(["check", str(store), "--repair"]) == 1
    assert "nothing is removed" in capsys.readouterr().err
    assert len(list(store.glob("0*"))) == 2


def test_repair_is_refused_while_somebody_trains(store: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lock = StoreLock.acquire(store, lambda _: None)
    assert run(["check", str(store), "--repair"]) == 2
    assert "another trainer" in capsys.readouterr().err
    lock.close()


def test_export_safetensors(store: Path, tmp_path: Path) -> None:
    """The files, byte for byte."""
    assert run(["export", str(store), "--to", "safetensors", "-o", str(tmp_path / "out")]) == 0
    for name in ("model.safetensors", "optimizer.safetensors", "commit.json"):
        assert (tmp_path / "out" / name).read_bytes() == (store / "00000002-iteration-4" / name).read_bytes()
    assert load_file(tmp_path / "out" / "model.safetensors")["w"].shape == (300, 7)


def expected() -> dict[str, dict[str, torch.Tensor]]:
    slot = memoryview(bytearray(SMALL.size_bytes))
    fill(slot, SMALL, 3)
    w = torch.frombuffer(slot, dtype=torch.float32, count=2100, offset=4096).reshape(300, 7)
    return {"model": {"w": w, "v": w}, "optimizer": {"w.exp_avg": w}}


def test_export_torch(store: Path, tmp_path: Path) -> None:
    """For torch.load without pickled code: tensors by name, tied ones too, and the commit record."""
    output = tmp_path / "out.pt"
    assert run(["export", str(store), "--to", "torch", "-o", str(output), "--iteration", "3"]) == 0
    loaded = torch.load(output, weights_only=True)
    assert json.loads(loaded["commit"]) == {"iteration": 3}
    for file, tensors in expected().items():
        for name, tensor in tensors.items():
            assert torch.equal(loaded[file][name].view(torch.uint8), tensor.view(torch.uint8))
    assert loaded["model"]["v"].data_ptr() == loaded["model"]["w"].data_ptr()


def test_export_dcp(store: Path, tmp_path: Path) -> None:
    """torch.distributed.checkpoint loads it."""
    from torch.distributed.checkpoint.state_dict_loader import load

    output = tmp_path / "dcp"
    assert run(["export", str(store), "--to", "dcp", "-o", str(output), "--iteration", "3"]) == 0
    state: dict[str, object] = {
        file: {name: torch.empty_like(tensor) for name, tensor in tensors.items()}
        for file, tensors in expected().items()
    }
    with pytest.warns(UserWarning, match=r"torch.distributed is .*uninitialized"):
        load(state, checkpoint_id=output, no_dist=True)
    for file, tensors in expected().items():
        found = state[file]
        assert isinstance(found, dict)
        for name, tensor in tensors.items():
            assert torch.equal(found[name].view(torch.uint8), tensor.view(torch.uint8))


def test_export_takes_the_newest_that_verifies(store: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    break_newest(store)
    assert run(["export", str(store), "--to", "safetensors", "-o", str(tmp_path / "out"), "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["iteration"] == 3
    assert "skipped 00000002-iteration-4" in captured.err


def test_export_overwrites_nothing_and_leaves_nothing_half(store: Path, tmp_path: Path) -> None:
    (tmp_path / "there").write_text("mine")
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "there")]) == 2
    assert (tmp_path / "there").read_text() == "mine"
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "no" / "folder")]) == 2
    assert run(["export", str(store), "--to", "torch", "-o", str(tmp_path / "out"), "--iteration", "9"]) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["store", "there"]
