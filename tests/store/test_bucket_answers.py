"""What a bucket answers that no sound one does, and what lies in it that is none of ours."""

from __future__ import annotations

import time
from pathlib import Path

import obstore
import pytest
import torch
from bucket_server import BUCKET, Between, BucketServer, between, refused
from small_store import DIRECT, silent, stage, until

import checkflow
from checkflow.cli import run
from checkflow.errors import InputError, StoreError
from checkflow.store.both.config import BucketConfig
from checkflow.store.bucket.names import BucketContents
from checkflow.store.bucket.objects import WRITTEN, BucketError, _told
from checkflow.store.format.manifest import BLOCK_BYTES
from checkflow.store.format.ranks import directory_of
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

SIZE_BYTES = BLOCK_BYTES + BLOCK_BYTES // 2
DATA = bytes(range(256)) * (SIZE_BYTES // 256)
NO_LISTING = b"<?xml version='1.0'?><Error><Code>InternalError</Code></Error>"


def is_listing(path: str) -> bool:
    return "list-type" in path


def halved(method: str, path: str, status: int, body: bytes) -> tuple[int, bytes]:
    """What is read comes short, and says so."""
    return status, body[: len(body) // 2] if method == "GET" and not is_listing(path) else body


def unlisted(_: str, path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return status, NO_LISTING if is_listing(path) else body


def upload_one(server: BucketServer, store: Path) -> None:
    with StoreHandle.open(store, [DIRECT], notify=silent, persist_every=PersistEvery(iterations=1)) as handle:
        uploader = handle.start_uploader(BucketConfig(store, server.url, Retention()))
        stage(handle, DIRECT, 1)
        assert handle.drain(60)
        uploader.close(60)


def test_an_object_that_comes_short_is_one_that_is_not_what_was_written(server: BucketServer) -> None:
    """No panic of a library: each block is asked for, and compared with its hash."""
    server.objects.put("large", iter([DATA]), SIZE_BYTES)
    with between(server) as here:
        objects = server.objects
        assert b"".join(objects.blocks("large", SIZE_BYTES)) == DATA
        here.fault = halved
        short = list(objects.blocks("large", SIZE_BYTES))
        assert [len(block) for block in short] == [SIZE_BYTES // 2, 0]
        assert len(objects.block("large", 1, SIZE_BYTES)) == BLOCK_BYTES // 4


def test_a_panic_below_is_one_more_answer_of_the_bucket(server: BucketServer) -> None:
    """It is no Exception to Python."""
    server.objects.put("large", iter([DATA]), SIZE_BYTES)
    with between(server) as here:
        objects = server.objects
        here.fault = halved
        starts, ends = [0, BLOCK_BYTES], [BLOCK_BYTES, SIZE_BYTES]
        with pytest.raises(BucketError, match="obstore has panicked") as caught, _told():
            obstore.get_ranges(objects._at(), "large", starts=starts, ends=ends)
        assert not caught.value.is_refused and not caught.value.is_missing


@pytest.mark.parametrize("name", ["logs//x", "/x", "/", "%2E%2E/x", "./x", "logs/../y", "logs/a%01b", "%01a"])
def test_somebody_else_s_object_is_left_alone_whatever_its_name(server: BucketServer, name: str) -> None:
    ours = [f"{directory_of(1, 2)}/10000001-iteration-5/manifest.json", "10000001-iteration-5/manifest.json", WRITTEN]
    for each in ours:
        server.objects.put(each, iter([b"1"]), 1)
    server.put_as_is(name)
    assert set(ours) <= server.objects.sizes().keys()


def test_a_name_among_ours_that_cannot_be_read_is_named(
    server: BucketServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    upload_one(server, tmp_path / "store")
    server.put_as_is("ab%01c")
    assert run(["list", server.url]) == 2
    said = capsys.readouterr().err.strip()
    assert said.startswith(f"checkflow: {server.url}: cannot be read (has an object whose name cannot be read (")
    assert "ab" in said and said.endswith("; remove or rename that object") and "credentials" not in said
    model = torch.nn.Linear(2, 2)
    with pytest.raises(InputError, match=r"has an object whose name .*; remove or rename that object$"):
        checkflow.attach(model, torch.optim.AdamW(model.parameters()), store=tmp_path / "new", bucket=server.url)


def test_names_that_cannot_be_read_cost_a_request_for_each_directory(server: BucketServer) -> None:
    ranks, checkpoints = 2, 3
    for rank in range(ranks):
        for number in range(1, checkpoints + 1):
            name = f"{directory_of(rank, ranks)}/1000000{number}-iteration-{number}/manifest.json"
            server.objects.put(name, iter([b"1"]), 1)
    server.objects.put(WRITTEN, iter([b""]), 0)
    with between(server) as here:
        objects = server.objects
        sound = objects.sizes()
        assert len(here.asked) == 1
        server.put_as_is("logs//x")
        here.asked.clear()
        assert objects.sizes() == sound
        assert len(here.asked) == 1 + 1 + ranks + ranks * checkpoints


def last_lost(_: str, path: str, status: int, body: bytes) -> tuple[int, bytes]:
    """The first page, and no word of the next one."""
    return status, body.replace(WRITTEN.encode(), b"missing") if is_listing(path) else body


@pytest.mark.parametrize("fault", [unlisted, last_lost])
def test_a_listing_that_is_none_or_not_whole_is_no_empty_bucket(
    server: BucketServer, tmp_path: Path, capsys: pytest.CaptureFixture[str], fault: object
) -> None:
    upload_one(server, tmp_path / "store")
    with between(server) as here:
        here.fault = fault  # type: ignore[assignment]
        assert run(["list", server.url]) == 2
        said = capsys.readouterr().err.strip()
        assert "its listing does not show written" in said and said.endswith("see what answers at its endpoint")
        model = torch.nn.Linear(2, 2)
        with pytest.raises(StoreError, match="its listing does not show written"):
            checkflow.attach(model, torch.optim.AdamW(model.parameters()), store=tmp_path / "new", bucket=server.url)
        here.fault = None
        assert run(["list", server.url]) == 0


def test_a_first_upload_between_two_questions_is_no_false_listing(server: BucketServer) -> None:
    with between(server) as here:
        objects = server.objects

        def begins(_: str, path: str, status: int, body: bytes) -> tuple[int, bytes]:
            if is_listing(path):
                here.fault = None
                objects.put(WRITTEN, iter([b""]), 0)
            return status, body

        here.fault = begins
        assert objects.sizes() == {WRITTEN: 0}


def test_of_several_ranks_the_bucket_of_all_is_seen_to_be_written(server: BucketServer, tmp_path: Path) -> None:
    below = server.objects.below(directory_of(0, 2))
    with StoreHandle.open(
        tmp_path / "store", [DIRECT], notify=silent, persist_every=PersistEvery(iterations=1)
    ) as handle:
        config = BucketConfig(tmp_path / "store", below.url, Retention(), in_doubt=1, whole_url=server.url)
        uploader = handle.start_uploader(config)
        stage(handle, DIRECT, 1)
        assert handle.drain(60)
        uploader.close(60)
    assert len(BucketContents.of(below.sizes()).checkpoints) == 1
    assert {WRITTEN, f"{directory_of(0, 2)}/{WRITTEN}"} <= server.objects.sizes().keys()


def gone(_: str, path: str, status: int, body: bytes) -> tuple[int, bytes]:
    return refused("NoSuchBucket", 404) if is_listing(path) else (status, body)


def uploaded_behind(here: Between, server: BucketServer, store: Path, told: list[str], *, ends: bool) -> bool:
    """One is uploaded, the bucket goes, and it is waited for the last one. Whether it was said to be there."""
    with StoreHandle.open(store, [DIRECT], notify=told.append, persist_every=PersistEvery(iterations=1)) as handle:
        uploader = handle.start_uploader(BucketConfig(store, server.url, Retention(), 0.0))
        stage(handle, DIRECT, 1)

        def uploaded() -> bool:
            handle.poll()
            uploader.poll()
            return handle.status().uploaded_iteration == 1

        until(uploaded, "it is uploaded")
        here.fault = gone
        if not ends:
            has_all = uploader.wait(time.monotonic() + 5)
            here.fault = None
            uploader.close(60)
            return has_all
        uploader.close(60)
        return not uploader.is_over


def test_a_bucket_that_goes_after_the_last_upload_is_told(server: BucketServer, tmp_path: Path) -> None:
    told: list[str] = []
    with between(server) as here:
        assert not uploaded_behind(here, server, tmp_path / "store", told, ends=True)
    assert f"{server.url}: it cannot be seen whether the last checkpoint is still there (" in told[-1]
    assert told[-1].endswith("NoSuchBucket), and was tried for 0 s; the disk has it")


def test_a_bucket_that_was_not_seen_is_not_said_to_have_all(server: BucketServer, tmp_path: Path) -> None:
    """And is looked at again: it has, when it ends."""
    told: list[str] = []
    with between(server) as here:
        assert not uploaded_behind(here, server, tmp_path / "store", told, ends=False)
    assert any("it cannot be seen whether the last checkpoint is still there" in line for line in told)
    assert any(line.startswith(f"{server.url}: it answers again, after") for line in told)


def test_a_server_that_is_down_is_not_taken_for_a_wrong_name(
    server: BucketServer, capsys: pytest.CaptureFixture[str]
) -> None:
    server.out()
    try:
        for command in ("list", "check"):
            assert run([command, server.url]) == 2
            said = capsys.readouterr().err.strip()
            assert said.endswith("; try again") and "credentials" not in said
    finally:
        server.back()


@pytest.mark.parametrize("is_in_a_success", [False, True])
def test_what_may_not_be_removed_is_told(server: BucketServer, is_in_a_success: bool) -> None:
    """S3 is asked to delete by a POST, and may refuse with the status of a success."""
    server.objects.put("one", iter([b""]), 0)
    key = f"{server.url.removeprefix(f's3://{BUCKET}/')}/one"
    within = (
        f"<DeleteResult><Error><Key>{key}</Key><Code>AccessDenied</Code><Message>no</Message></Error></DeleteResult>"
    )
    answer = (200, within.encode()) if is_in_a_success else refused("AccessDenied", 403)
    with between(server) as here:
        objects = server.objects
        here.fault = lambda method, _, status, body: answer if method in ("POST", "DELETE") else (status, body)
        with pytest.raises(BucketError, match="AccessDenied") as caught:
            objects.remove(["one"])
        assert caught.value.is_refused
    server.objects.remove(["one"])
    assert "one" not in server.objects.sizes()
