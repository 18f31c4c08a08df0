"""The uploader: killed at any moment, and what the bucket has then; what it does beside a saver that prunes."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from bucket_server import BucketServer
from obstore.exceptions import GenericError
from processes import runs
from small_store import (
    DIRECT,
    InProcess,
    is_whole,
    load_again,
    record_of,
    silent,
    stage,
    trainer_command,
    until,
    until_verified,
)

from checkflow.store.both.config import BucketConfig
from checkflow.store.both.messages import FailedReport, receive
from checkflow.store.both.words import CLOSE
from checkflow.store.bucket import upload
from checkflow.store.bucket.download import download
from checkflow.store.bucket.loop import Uploader
from checkflow.store.bucket.names import UPLOADS, BucketContents, content_of, serial_of
from checkflow.store.bucket.objects import BucketError, Objects, first_line
from checkflow.store.bucket.upload import Uploads
from checkflow.store.format.layout import FileSpec, Layout, TensorSpec
from checkflow.store.format.manifest import KEPT
from checkflow.store.format.reader import load_newest, newest
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.bucket_process import BucketProcess
from checkflow.store.trainer.handle import StoreHandle
from checkflow.store.trainer.persist_every import PersistEvery

NIGHTLY = os.environ.get("HYPOTHESIS_PROFILE") == "nightly"
KILLS = 100 if NIGHTLY else 12
EACH = PersistEvery(iterations=1)


def whole_in(server: BucketServer, tmp_path: Path) -> list[int]:
    """Iterations of all checkpoints that count there, newest first, each byte of them checked."""
    contents, found = server.contents(), []
    for name in contents.newest_first:
        into = tmp_path / f"{time.monotonic_ns()}"
        into.mkdir()
        download(server.objects, name, contents.checkpoints[name], into)
        loaded = load_newest(into).loaded
        assert loaded is not None and is_whole(loaded, DIRECT)
        found.append(loaded.checkpoint.iteration)
    return found


def until_uploaded(handle: StoreHandle, uploader: BucketProcess, iteration: int) -> None:
    def uploaded() -> bool:
        handle.poll()
        uploader.poll()
        return (handle.status().uploaded_iteration or 0) >= iteration

    until(uploaded, f"iteration {iteration} is uploaded")


def until_told(uploader: BucketProcess, told: list[str]) -> None:
    def is_told() -> bool:
        uploader.poll()
        return bool(told)

    until(is_told, "it is told")


def test_the_uploader_is_killed_at_any_moment(server: BucketServer, tmp_path: Path) -> None:
    """What counts in the bucket is old or new, whole, and no less than it had said; another one goes on."""
    choose = random.Random(0)
    told: list[str] = []
    config = BucketConfig(tmp_path / "store", server.url, Retention(last=2))
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=told.append, persist_every=EACH) as handle:
        uploader = handle.start_uploader(config)
        for iteration in range(1, KILLS + 1):
            stage(handle, DIRECT, iteration)
            assert handle.drain(60)
            said = handle.status().uploaded_iteration or 0
            if choose.random() < 0.5:  # else the next one has hardly begun
                time.sleep(choose.random() * 1.5)
            with contextlib.suppress(ProcessLookupError):  # it is being started anew
                os.kill(uploader.pid, signal.SIGKILL)
            found = whole_in(server, tmp_path)
            assert (found[0] if found else 0) >= said
            until_uploaded(handle, uploader, iteration) if iteration % 4 == 0 else uploader.poll()
        until_uploaded(handle, uploader, KILLS)
        uploader.close(60)
    assert whole_in(server, tmp_path) == [KILLS, *whole_in(server, tmp_path)[1:]]
    contents = server.contents()
    assert len(contents.checkpoints) == 2 and not contents.unfinished and len(contents.begun) == 1
    assert all("died" in line for line in told)


def test_what_is_uploaded_may_be_pruned_meanwhile(server: BucketServer, tmp_path: Path) -> None:
    """Many checkpoints a second, each pruned soon: those that are uploaded are whole, and the last one is."""
    config = BucketConfig(tmp_path / "store", server.url, Retention(last=1))
    with StoreHandle.open(
        tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH, retention=Retention(last=1)
    ) as handle:
        uploader = handle.start_uploader(config)
        for iteration in range(1, 201):
            stage(handle, DIRECT, iteration)
            handle.drain(60)
            handle.poll()
            uploader.poll()
        until_uploaded(handle, uploader, 200)
        uploader.close(60)
        assert 1 <= handle.status().uploaded <= 200
    assert whole_in(server, tmp_path) == [200]


@pytest.mark.parametrize("is_out", [False, True])
def test_who_asks_once_it_is_closed_hears_whether_the_bucket_has_all(
    server: BucketServer, tmp_path: Path, is_out: bool
) -> None:
    """As SIGTERM does while close() waits."""
    config = BucketConfig(tmp_path / "store", server.url, Retention(last=1))
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH) as handle:
        uploader = handle.start_uploader(config)
        stage(handle, DIRECT, 1)
        assert handle.drain(60)
        if is_out:
            server.out()
        uploader.close(0.0 if is_out else 60.0)
        assert uploader.wait(time.monotonic() + 0.5) is not is_out
        if is_out:
            os.kill(uploader.pid, signal.SIGKILL)
            assert not uploader.wait(time.monotonic() + 5)
            server.back()


LARGE = Layout.of((FileSpec("model.safetensors", (TensorSpec("w", "F32", (20, 1024, 1024)),)),))


def test_large_files_go_in_parts_and_come_back_in_blocks(server: BucketServer, tmp_path: Path) -> None:
    """80 MiB and a header: eleven parts, and more blocks than come at once."""
    with StoreHandle.open(tmp_path / "store", [LARGE], notify=silent, persist_every=EACH) as handle:
        uploader = handle.start_uploader(BucketConfig(tmp_path / "store", server.url, Retention()))
        slot = handle.acquire()
        assert slot is not None
        (tensor,) = LARGE.files[0].tensors
        slot.data[tensor.offset_bytes : tensor.end_bytes] = random.Random(0).randbytes(tensor.spec.size_bytes)
        handle.stage(slot, 1, record_of(1))
        until_uploaded(handle, uploader, 1)
        uploader.close(60)
        assert handle.status().uploaded_bytes == LARGE.files[0].size_bytes + len(record_of(1))
    contents = server.contents()
    (name,) = contents.newest_first
    (tmp_path / "other").mkdir()
    download(server.objects, name, contents.checkpoints[name], tmp_path / "other")
    one, other = (newest(tmp_path / where).checkpoint for where in ("store", "other"))
    assert one is not None and other is not None and one.manifest.files == other.manifest.files
    for entry in one.manifest.files:
        assert (one.path / entry.name).read_bytes() == (other.path / entry.name).read_bytes()


def test_of_a_rank_no_more_is_uploaded_at_the_end_than_may_be_what_all_have(
    server: BucketServer, tmp_path: Path
) -> None:
    """However much short lives have left on its disk."""
    retention = Retention(last=9)
    with StoreHandle.open(
        tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH, retention=retention
    ) as handle:
        for iteration in range(1, 7):
            stage(handle, DIRECT, iteration)
            until_verified(handle, iteration)
        uploader = handle.start_uploader(BucketConfig(tmp_path / "store", server.url, Retention(), in_doubt=2))
        uploader.close(60)
    assert sorted(whole_in(server, tmp_path)) == [5, 6]


def test_what_another_run_marks_as_kept_is_kept(server: BucketServer, tmp_path: Path) -> None:
    """Though this one has uploaded it, and knows it as none that is."""
    config = BucketConfig(tmp_path / "store", server.url, Retention(last=1))
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH) as handle:
        uploader = handle.start_uploader(config)
        for iteration in range(1, 6):
            stage(handle, DIRECT, iteration)
            until_uploaded(handle, uploader, iteration)
            if iteration == 2:
                server.objects.put(f"{server.names()[0]}/{KEPT}", iter([b""]), 0)
        uploader.close(60)
    assert whole_in(server, tmp_path) == [5, 2]


class Lossy(Objects):
    """Accepts what it is given, and has half of each tensor file."""

    def put(self, name: str, blocks: Iterator[bytes], size_bytes: int) -> None:  # noqa: ARG002
        data = b"".join(blocks)
        kept = data[: len(data) // 2] if name.endswith(".safetensors") else data
        super().put(name, iter([kept]), len(kept))


def test_what_was_accepted_and_is_not_there_does_not_count(tmp_path: Path) -> None:
    """Nor is anything older removed for it."""
    sound = Objects.open(f"file://{tmp_path}/bucket")
    lossy = Lossy.open(sound.url)
    names = list[list[str]]()
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH) as handle:
        for iteration, objects in ((1, sound), (2, lossy)):
            stage(handle, DIRECT, iteration)
            until_verified(handle, iteration)
            checkpoint = newest(tmp_path / "store").checkpoint
            assert checkpoint is not None
            lost = contextlib.nullcontext() if objects is sound else pytest.raises(BucketError, match="not there whole")
            with lost:
                Uploads(objects, Retention(last=1), tmp_path / "store").upload(checkpoint, to_cache=True)
            names.append(BucketContents.of(sound.sizes()).newest_first)
    assert names[0] == names[1] and len(names[0]) == 1


class Late(Objects):
    """Lists nothing the first time that something is looked for."""

    def sizes(self) -> dict[str, int]:
        found, LOOKS[self.url] = super().sizes(), LOOKS.get(self.url, 0) + 1
        return {} if LOOKS[self.url] == 2 else found


LOOKS: dict[str, int] = {}  # by bucket


def test_what_a_bucket_lists_late_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(upload, "_LATE_S", (0.01,))
    sound = Objects.open(f"file://{tmp_path}/bucket")
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH) as handle:
        stage(handle, DIRECT, 1)
        until_verified(handle, 1)
    checkpoint = newest(tmp_path / "store").checkpoint
    assert checkpoint is not None
    late = Late.open(sound.url)
    Uploads(late, Retention(), tmp_path / "store").upload(checkpoint, to_cache=True)
    assert LOOKS[sound.url] == 3
    assert len(BucketContents.of(sound.sizes()).newest_first) == 1


class Flipping(Objects):
    """What is read in blocks comes with a bit flipped in the first of them."""

    def blocks(self, name: str, size_bytes: int) -> Iterator[bytes]:
        first, *others = super().blocks(name, size_bytes)
        yield from (bytes([first[0] ^ 1]) + first[1:], *others)


def test_a_block_that_comes_damaged_is_read_once_more(server: BucketServer, tmp_path: Path) -> None:
    config = BucketConfig(tmp_path / "store", server.url, Retention())
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent, persist_every=EACH) as handle:
        uploader = handle.start_uploader(config)
        stage(handle, DIRECT, 1)
        until_uploaded(handle, uploader, 1)
        uploader.close(60)
    flipping, contents = Flipping.open(server.url), server.contents()
    (name,) = contents.newest_first
    (tmp_path / "there").mkdir()
    download(flipping, name, contents.checkpoints[name], tmp_path / "there")
    loaded = load_newest(tmp_path / "there").loaded
    assert loaded is not None and is_whole(loaded, DIRECT)


def test_an_answer_of_somebody_else_is_no_empty_bucket(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of a login page between here and there."""

    class Portal(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            page = b"<html><body>Log in</body></html>"
            self.send_response(200)
            self.send_header("Content-Length", str(len(page)))
            self.end_headers()
            self.wfile.write(page)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Portal) as portal:
        thread = threading.Thread(target=portal.serve_forever)
        thread.start()
        for name, value in (
            ("AWS_ENDPOINT_URL", f"http://127.0.0.1:{portal.server_port}"),
            ("AWS_ACCESS_KEY_ID", "key"),
            ("AWS_SECRET_ACCESS_KEY", "secret"),
            ("AWS_DEFAULT_REGION", "us-east-1"),
        ):
            monkeypatch.setenv(name, value)
        try:
            with pytest.raises(BucketError, match="no bucket"):
                Objects.open("s3://bucket/prefix").sizes()
        finally:
            portal.shutdown()
            thread.join()


def test_what_is_damaged_on_disk_is_not_uploaded(server: BucketServer, tmp_path: Path) -> None:
    """It is told, and the next one is uploaded."""
    told: list[str] = []
    config = BucketConfig(tmp_path, server.url, Retention())
    with StoreHandle.open(tmp_path, [DIRECT], notify=told.append, persist_every=EACH) as handle:
        stage(handle, DIRECT, 1)
        until_verified(handle, 1)
        found = newest(tmp_path).checkpoint
        assert found is not None
        data = bytearray((found.path / "model.safetensors").read_bytes())
        data[-1] ^= 1
        (found.path / "model.safetensors").write_bytes(data)
        uploader = handle.start_uploader(config)
        until_told(uploader, told)
        assert f"{found.path.name} is not uploaded (model.safetensors: block 0 is not what was written)" in told[0]
        assert not server.names()
        stage(handle, DIRECT, 2)
        until_uploaded(handle, uploader, 2)
        uploader.close(60)
    assert whole_in(server, tmp_path / "..") == [2] and len(told) == 1


@pytest.mark.parametrize(
    ("method", "told"),
    [
        ("upload", "iteration 1 cannot be uploaded ({}), and was tried for 0 s; the disk has it"),
        ("due", "{}; this run uploads no more"),
    ],
)
def test_a_bug_of_the_uploader_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, method: str, told: str) -> None:
    """It does not die of it, and another one after it, of which nobody hears why."""

    def fails(*_: object, **__: object) -> None:
        raise TypeError("not foreseen")

    saver = InProcess(tmp_path / "store")
    saver.persist(1)
    saver.close()
    monkeypatch.setattr(Uploads, method, fails)
    monkeypatch.chdir(tmp_path / "store")
    objects = Objects.open(f"file://{tmp_path}/bucket")
    uploads = Uploads(objects, Retention(), tmp_path / "store")
    config = BucketConfig(tmp_path / "store", objects.url, Retention(), 0.0)
    directory, trainer = os.open(tmp_path / "store", os.O_RDONLY), os.pidfd_open(os.getpid())
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        ours.send(CLOSE)
        assert not Uploader(config, uploads, theirs, trainer, directory).run()
        said = receive(ours)
    os.close(directory)
    os.close(trainer)
    why = told.format("internal error, please report it (TypeError: not foreseen)")
    assert said == FailedReport(sequence=0, message=f"{objects.url}: {why}")


def test_what_fails_without_a_trainer_is_told_to_the_next(server: BucketServer, tmp_path: Path) -> None:
    command = trainer_command(TRAINER.replace("Retention()", "Retention(), 1.0"), tmp_path / "store", server.url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        server.out()
        _, uploader, _ = trainer.stdout.readline().split()
        trainer.kill()
    until(lambda: not runs(int(uploader)), "it has tried for a second")
    server.back()
    told: list[str] = []
    StoreHandle.open(tmp_path / "store", [DIRECT], notify=told.append).close()
    assert f"{server.url}: iteration 29 cannot be uploaded" in told[0]
    assert "was tried for 1 s; the disk has it" in told[0]


TRAINER = """
import pathlib, time
from small_store import *
from checkflow.store.both.config import BucketConfig
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery
store = pathlib.Path(sys.argv[1])
handle = StoreHandle.open(store, [DIRECT], persist_every=PersistEvery(iterations=10**6), notify=silent)
uploader = handle.start_uploader(BucketConfig(store, sys.argv[2], Retention()))
for iteration in range(1, 30):
    stage(handle, DIRECT, iteration)
    handle.poll()
print("staged", uploader.pid, handle.saver_pid, flush=True)
time.sleep(1000)
"""


def test_a_killed_trainer_s_last_checkpoint_is_uploaded(server: BucketServer, tmp_path: Path) -> None:
    """Its saver makes it durable, the uploader waits for that, and ends."""
    command = trainer_command(TRAINER, tmp_path / "store", server.url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        _, uploader, saver = trainer.stdout.readline().split()
        trainer.kill()
    until(lambda: not runs(int(saver)), "the saver ends")
    until(lambda: not runs(int(uploader)), "the uploader ends")
    assert whole_in(server, tmp_path)[0] == 29
    written = newest(tmp_path / "store").checkpoint
    assert written is not None and written.iteration == 29 and load_again(written, DIRECT)


def test_the_next_run_need_not_wait_for_an_uploader(server: BucketServer, tmp_path: Path) -> None:
    """The bucket is out: the dead run's uploader tries on, and ends once the next one has the store."""
    command = trainer_command(TRAINER, tmp_path / "store", server.url)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as trainer:
        assert trainer.stdout is not None
        _, uploader, saver = trainer.stdout.readline().split()
        server.out()
        trainer.kill()
    until(lambda: not runs(int(saver)), "the saver ends")
    assert runs(int(uploader))
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=silent):
        until(lambda: not runs(int(uploader)), "it ends")
    server.back()
    assert not server.names() or server.names()[0].endswith("-iteration-1")


def test_names_say_who_put_them() -> None:
    """A directory of the bucket is one of a store; serials of a later attempt are higher; others' objects are none."""
    sizes = {
        "00000002.attempt": 1,
        f"{UPLOADS + 9:08d}-iteration-50/manifest.json": 9,
        f"{2 * UPLOADS + 1:08d}-iteration-40/manifest.json": 9,
        f"{2 * UPLOADS + 1:08d}-iteration-40/model.safetensors": 7,
        f"{3 * UPLOADS + 1:08d}-iteration-41/model.safetensors": 7,
        "readme.md": 1,
        "plots/a/b.png": 1,
        "12-iteration-3/manifest.json": 1,
    }
    contents = BucketContents.of(sizes)
    assert contents.newest_first == ["20000001-iteration-40", "10000009-iteration-50"]
    assert [serial_of(name) for name in contents.newest_first] == [2 * UPLOADS + 1, UPLOADS + 9]
    assert list(contents.unfinished) == ["30000001-iteration-41"]
    assert contents.attempt == 3 and contents.begun == {2}


def test_a_prefix_without_a_number_left_is_told(tmp_path: Path) -> None:
    """Somebody put an object of that name."""
    objects = Objects.open(f"file://{tmp_path}/bucket")
    objects.put_new("99999999.attempt", b"")
    told: list[str] = []
    with StoreHandle.open(tmp_path / "store", [DIRECT], notify=told.append, persist_every=EACH) as handle:
        uploader = handle.start_uploader(BucketConfig(tmp_path / "store", objects.url, Retention(), 0.0))
        stage(handle, DIRECT, 1)
        until_told(uploader, told)
        uploader.close(60)
    assert "there is 99999999.attempt, and no number is left; use another prefix" in told[0]
    assert "the disk has it" in told[-1]


def test_the_same_content_has_one_name_wherever_it_lies(tmp_path: Path) -> None:
    with StoreHandle.open(tmp_path, [DIRECT], notify=silent) as handle:
        stage(handle, DIRECT, 1)
    found = newest(tmp_path).checkpoint
    assert found is not None
    other = found.manifest.model_copy(update={"serial": 77})
    assert content_of(other) == content_of(found.manifest)
    assert content_of(other.model_copy(update={"iteration": 2})) != content_of(found.manifest)


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (
            "Generic S3 error: Error performing PUT http://host/b/k?uploadId=aB%2F1 in 545.187512ms, after 3 retries, "
            "max_retries: 3, retry_timeout: 10s  - HTTP error: error sending request\n\nDebug source:\nGeneric {",
            "Error performing PUT http://host/b/k - HTTP error: error sending request",
        ),
        (
            "Object at location k not found: Error performing GET http://host/b/k in 2.3ms - Server returned non-2xx "
            "status code: 404 Not Found: <?xml version='1.0'?>\n<Error><Code>NoSuchBucket</Code><Message>no</Message>",
            "Object at location k not found: Error performing GET http://host/b/k - Server returned non-2xx "
            "status code: 404 Not Found NoSuchBucket",
        ),
    ],
)
def test_what_a_server_says_is_told_in_a_line(said: str, told: str) -> None:
    assert first_line(GenericError(said)) == told
