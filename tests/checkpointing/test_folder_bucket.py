"""A bucket that is a directory, file:///path: what makes it, and what it may not be."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.checkpointing.foreseen import foreseen
from checkflow.checkpointing.voices import Hearers
from checkflow.cli import run
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.store.bucket.folder import folder_of
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.bucket.upload import Uploads
from checkflow.store.format.disk import LocalDisk
from checkflow.store.format.writer import remove_checkpoint

EACH = checkflow.PersistEvery(iterations=1)


def attached(store: Path, bucket: str, told: list[str]) -> checkflow.Checkpointer:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    return checkflow.attach(
        model, optimizer, store=store, bucket=bucket, persist_every=EACH, notify=told.append, tell=lambda _: None
    )


def step(ckpt: checkflow.Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.randn(4, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()


def until(condition: Callable[[], object], what: str, meanwhile: Callable[[], object] = lambda: None) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline, what
        meanwhile()
        time.sleep(0.01)


@pytest.mark.parametrize("command", ["list", "check", "export"])
def test_who_reads_makes_no_directory(command: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    url = f"file://{tmp_path}/no/where"
    more = ["--to", "torch", "-o", str(tmp_path / "x")] if command == "export" else []
    assert run([command, url, *more]) == 2
    captured = capfd.readouterr()
    assert captured.out == ""
    assert captured.err.splitlines()[-1].startswith(
        f"checkflow: {url}: cannot be read (No such file or directory); check its path"
    )
    assert not list(tmp_path.iterdir())


def test_what_is_asked_before_anything_is_uploaded_makes_none(tmp_path: Path) -> None:
    """It is an empty bucket until then."""
    objects = Objects.open(f"file://{tmp_path}/bucket")
    assert objects.sizes() == {} and objects.below("rank-0-of-2").sizes() == {}
    objects.remove(["a"])
    with pytest.raises(BucketError) as caught:
        objects.read("a")
    assert caught.value.is_missing
    assert foreseen(tmp_path / "store", 5.0, Hearers(print, print), objects.url) is None
    assert not (tmp_path / "bucket").exists()
    objects.put("a", iter([b"b"]), 1)
    assert objects.sizes() == {"a": 1}


def test_an_attach_that_is_refused_makes_none(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="slots"):
        checkflow.attach(
            torch.nn.Linear(2, 2), [], store=tmp_path / "store", bucket=f"file://{tmp_path}/bucket", slots=0
        )
    assert not (tmp_path / "bucket").exists()


def test_where_none_can_be_made_attach_says_so(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in ("file", "file/below"):
        with pytest.raises(InputError) as caught:
            attached(tmp_path / "store", f"file://{tmp_path}/{path}", [])
        assert str(caught.value) == (
            f"bucket: file://{tmp_path}/{path}: Not a directory; check its path, and who may read what is below it"
        )


def test_a_url_is_a_path(tmp_path: Path) -> None:
    """With what a URL writes otherwise, as other programs read it."""
    for text, path in (
        ("file:///a%20b/c", "/a b/c"),
        ("file://localhost/a", "/a"),
        ("file:/a/b/../c/", "/a/c"),
        ("FILE:///%25", "/%"),
    ):
        assert folder_of(text) == Path(path)
    assert folder_of("s3://bucket/prefix") is None
    for text in (
        "file:",
        "file://",
        "file:a",
        "file://host/a",
        "file:///a?b",
        "file:///a#b",
        "file:///%FF",
        "file:///%00",
    ):
        with pytest.raises(InputError) as caught:
            folder_of(text)
        assert len(str(caught.value).splitlines()) == 1
    for name in ("a b", "50%", "ü"):
        objects = Objects.open((tmp_path / name).as_uri())
        objects.put("a", iter([b"b"]), 1)
        assert (tmp_path / name / "a").read_bytes() == b"b" and objects.sizes() == {"a": 1}


@pytest.mark.parametrize(
    ("bucket", "what"),
    [
        ("store", "is"),
        ("store/", "is"),
        ("other/../store", "is"),
        ("link", "is"),
        ("link/below", "lies in"),
        ("store/below/it", "lies in"),
        ("", "contains"),
        ("around", "contains"),
    ],
)
@pytest.mark.parametrize("is_there", [False, True])
def test_a_bucket_is_apart_from_the_store(bucket: str, what: str, is_there: bool, tmp_path: Path) -> None:
    """Whatever it is called, and nothing is done to what is there; a program that only looks is refused as well."""
    (tmp_path / "link").symlink_to("store")
    (tmp_path / "around").symlink_to(".")
    store, url = tmp_path / "store", f"file://{tmp_path}/{bucket}"
    if is_there:
        (store / "00000001-iteration-5").mkdir(parents=True)
    before = sorted(tmp_path.rglob("*"))
    for refused in (lambda: attached(store, url, []), lambda: foreseen(store, 5.0, Hearers(print, print), url)):
        with pytest.raises(InputError) as caught:
            refused()
        assert str(caught.value) == (
            f"bucket: {url} {what} the store, {store}; give a directory beside it, on another disk"
        )
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize("lock", ["lock", "rank-0-of-2/lock"])
def test_a_bucket_is_no_store(lock: str, tmp_path: Path) -> None:
    """Not even where nobody has it now; of a copy without its lock the checkpoints are those of a bucket."""
    url, other = f"file://{tmp_path}/other", tmp_path / "other"
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(model, optimizer, store=(other / lock).parent, tell=lambda _: None) as ckpt:
        for _ in range(ckpt.restore(), 3):
            step(ckpt, model, optimizer)
    with pytest.raises(InputError) as caught:
        attached(tmp_path / "store", url, [])
    assert str(caught.value) == (
        f"bucket: {url} is a store, with {lock}; give another directory, or remove that from a copy in which nobody "
        "trains"
    )
    (other / lock).unlink()
    if lock == "lock":
        with attached(tmp_path / "store", url, []) as ckpt:
            assert ckpt.restore() == 3


def test_a_bucket_that_becomes_a_store_is_left_alone(tmp_path: Path) -> None:
    """Another trainer has begun in it since. What is there stays, and closing waits for nothing."""
    told: list[str] = []
    bucket, url = tmp_path / "bucket", f"file://{tmp_path}/bucket"
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(
        model, optimizer, store=tmp_path / "store", bucket=url, persist_every=EACH, on_error="warn",
        notify=told.append, tell=lambda _: None,
    ) as ckpt:  # fmt: skip
        ckpt.restore()
        until(lambda: ckpt.status().uploaded_iteration, "it is uploaded", lambda: step(ckpt, model, optimizer))
        ckpt.save()
        (bucket / "lock").touch()
        theirs = bucket / "00000001-iteration-5"
        theirs.mkdir()
        until(lambda: told, "it is told", lambda: step(ckpt, model, optimizer))
        before = sorted(bucket.rglob("*"))
    assert told == [
        f"{url}: is a store, with lock; give another directory, or remove that from a copy in which nobody trains; "
        "this run uploads no more"
    ]
    assert sorted(bucket.rglob("*")) == before


def with_two(store: Path) -> Path:
    """A store of two checkpoints."""
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    with checkflow.attach(model, optimizer, store=store, persist_every=EACH, tell=lambda _: None) as ckpt:
        ckpt.restore()
        for _ in range(2):
            step(ckpt, model, optimizer)
            ckpt.save()
    return store


def test_a_checkpoint_that_lacks_a_file_is_not_due_again(tmp_path: Path) -> None:
    """Else an uploader would look for it without a pause, and never end."""
    store = with_two(tmp_path / "store")
    uploads = Uploads(Objects.open(f"file://{tmp_path}/bucket"), checkflow.Retention(), store)
    newest = uploads.found(store, 2)
    assert newest is not None
    (newest.path / "model.safetensors").unlink()
    with pytest.raises(CorruptStoreError, match=r"model\.safetensors: is missing"):
        uploads.upload(newest, to_cache=True)
    due = uploads.due(store)
    assert due is not None and due.serial == 1
    remove_checkpoint(LocalDisk(), due.path)
    with pytest.raises(FileNotFoundError):
        uploads.upload(due, to_cache=True)


class Full(Objects):
    """Has room for the model's tensors, or for all."""

    def put(self, name: str, blocks: Iterator[bytes], size_bytes: int) -> None:
        if (self.folder or Path()).with_name("full").exists() and name.endswith("optimizer.safetensors"):
            raise BucketError("No space left on device")
        super().put(name, blocks, size_bytes)


def test_a_try_that_failed_leaves_nothing_to_the_next(tmp_path: Path) -> None:
    """A target without room is not filled by tries; what is somebody else's stays until there is a newer one."""
    store, bucket = with_two(tmp_path / "store"), tmp_path / "bucket"
    theirs = "00000001-iteration-1"
    objects = Full.open(f"file://{bucket}")
    objects.put(f"{theirs}/model.safetensors", iter([b"x"]), 1)
    (tmp_path / "full").touch()
    uploads = Uploads(objects, checkflow.Retention(last=1), store)
    older, newest = uploads.found(store, 1), uploads.found(store, 2)
    assert older is not None and newest is not None
    for number in range(1, 4):
        with pytest.raises(BucketError, match="No space left"):
            uploads.upload(older, to_cache=True)
        assert directories_in(bucket) == [theirs, f"{10**7 + number}-iteration-1"]
    uploads.clear()
    assert directories_in(bucket) == [theirs]
    (tmp_path / "full").unlink()
    uploads.upload(older, to_cache=True)
    uploads.upload(newest, to_cache=True)
    assert directories_in(bucket) == [theirs, "10000004-iteration-1", "10000005-iteration-2"]
    uploads.prune()  # both were saved, and theirs was never finished
    assert directories_in(bucket) == ["10000004-iteration-1", "10000005-iteration-2"]


def directories_in(bucket: Path) -> list[str]:
    return sorted(path.name for path in bucket.iterdir() if path.is_dir())
