"""A bucket that is a directory, file:///path: what makes it, and what it may not be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import checkflow
from checkflow.checkpointing.foreseen import foreseen
from checkflow.cli import run
from checkflow.errors import InputError, StoreError
from checkflow.store.bucket.folder import folder_of
from checkflow.store.bucket.objects import BucketError, Objects

EACH = checkflow.PersistEvery(iterations=1)


def attached(store: Path, bucket: str, told: list[str]) -> checkflow.Checkpointer:
    model = torch.nn.Linear(6, 3)
    optimizer = torch.optim.AdamW(model.parameters())
    return checkflow.attach(
        model, optimizer, store=store, bucket=bucket, persist_every=EACH, notify=told.append, tell=lambda _: None
    )


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
    assert foreseen(tmp_path / "store", 5.0, print, objects.url) is None
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
