"""A training with a bucket behind its store: a lost disk, a bucket that is out, objects that are damaged, kills."""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from bucket_server import BucketServer, bucket_server
from processes import until

import checkflow
from checkflow.background import remove_written
from checkflow.checkpointing.foreseen import foreseen
from checkflow.checkpointing.voices import Hearers
from checkflow.cli import run
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.events import Event, Uploaded
from checkflow.store.both.lock import StoreLock
from checkflow.store.bucket.names import iteration_of
from checkflow.store.bucket.objects import SMALL_S, WRITTEN
from checkflow.store.format.manifest import MANIFEST
from checkflow.store.format.reader import Checkpoint, list_checkpoints, newest
from checkflow.store.format.retention import Retention
from checkflow.store.trainer.persist_every import PersistEvery

EACH = PersistEvery(iterations=1)


def build() -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = torch.nn.Linear(6, 3)
    return model, torch.optim.AdamW(model.parameters())


def train(ckpt: checkflow.Checkpointer, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.autograd.backward(model(torch.randn(4, 6)).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    ckpt.step()


class Life:
    """One run of a training: attached, restored, and what it was told."""

    def __init__(self, store: Path, bucket: str, **options: object) -> None:
        self.model, self.optimizer = build()
        self.told: list[str] = []
        self.said: list[str] = []
        self.events: list[Event] = []
        self.ckpt = checkflow.attach(
            self.model, self.optimizer, store=store, bucket=bucket, notify=self.told.append, tell=self.said.append,
            on_event=self.events.append, **{"persist_every": EACH, **options},  # type: ignore[arg-type]
        )  # fmt: skip

    def __enter__(self) -> Life:
        return self

    def __exit__(self, *_: object) -> None:
        self.ckpt.close()

    def train(self, iterations: int) -> None:
        for _ in range(iterations):
            train(self.ckpt, self.model, self.optimizer)

    def until(self, condition: Callable[[], bool]) -> None:
        """Train on until something is so: the bucket is looked after at steps."""
        deadline = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < deadline, self.told
            self.train(1)
            time.sleep(0.02)

    @property
    def uploaded(self) -> int:
        return self.ckpt.status().uploaded_iteration or 0

    @property
    def put(self) -> list[int]:
        """Iterations that went over the network."""
        return [event.iteration for event in self.events if isinstance(event, Uploaded) and event.size_bytes > 0]

    @property
    def uploads(self) -> int:
        return len(self.put)

    def weights(self) -> dict[str, torch.Tensor]:
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


def damage(server: BucketServer, name: str, file: str = "model.safetensors") -> None:
    """Another byte in the middle of an object."""
    data = bytearray(server.objects.read(f"{name}/{file}"))
    data[len(data) // 2] ^= 1
    server.objects.put(f"{name}/{file}", iter([bytes(data)]), len(data))


def test_a_lost_disk_costs_nothing_that_was_uploaded(server: BucketServer, tmp_path: Path) -> None:
    """close() returns once the bucket has the last iteration; an empty disk gets it from there, byte for byte."""
    with Life(tmp_path / "one", server.url) as life:
        assert life.ckpt.restore() == 0
        life.train(5)
        before = life.weights()
    assert server.names()[0].endswith("-iteration-5")
    assert not life.told
    written = newest(tmp_path / "one").checkpoint
    assert written is not None
    for entry in written.manifest.files:
        assert server.objects.read(f"{server.names()[0]}/{entry.name}") == (written.path / entry.name).read_bytes()
    shutil.rmtree(tmp_path / "one")
    with Life(tmp_path / "other", server.url) as life:
        assert life.ckpt.restore() == 5
        assert same(life.weights(), before)
        assert "downloading" in life.said[1]
        life.train(2)
    assert server.names()[0].startswith("2000000") and server.names()[0].endswith("-iteration-7")  # by the second run
    assert 5 not in life.put, "it uploads once more what it got"
    assert not life.told


def test_what_the_disk_has_newer_is_taken_from_there(server: BucketServer, tmp_path: Path) -> None:
    with Life(tmp_path / "one", server.url) as life:
        life.train(3)
    with Life(tmp_path / "one", server.url) as life:
        assert life.ckpt.restore() == 3
        assert not [line for line in life.said if "downloading" in line]
        life.train(1)
    shutil.copytree(tmp_path / "one", tmp_path / "old")
    with Life(tmp_path / "one", server.url) as life:
        life.ckpt.restore()
        time.sleep(1.1)  # what is newer is known to the second
        life.train(4)
    names = server.names()
    with Life(tmp_path / "old", server.url):
        pass  # its uploader ends before anything is restored
    assert server.names() == names
    with Life(tmp_path / "old", server.url) as life:
        assert life.ckpt.restore() == 8


def test_who_uploads_nothing_new_leaves_all_as_it_is(server: BucketServer, tmp_path: Path) -> None:
    """What earlier runs marked on disk is neither put again nor put above what is newer."""
    for iteration in (2, 4):
        with Life(tmp_path / "store", server.url) as life:
            life.ckpt.restore()
            life.train(1)
            life.ckpt.save(keep=True)
            life.train(1)
            life.until(lambda life=life, iteration=iteration: life.uploaded >= iteration)  # type: ignore[misc]
    names = server.names()
    last = iteration_of(names[0])
    with Life(tmp_path / "store", server.url) as life:
        life.ckpt.restore()
    assert server.names() == names and life.uploaded == last and life.uploads == 0
    assert not life.told
    shutil.rmtree(tmp_path / "store")
    with Life(tmp_path / "store", server.url) as life:
        assert life.ckpt.restore() == last


def test_what_is_lost_from_the_bucket_is_there_when_the_run_has_closed(server: BucketServer, tmp_path: Path) -> None:
    with Life(tmp_path / "store", server.url) as life:
        life.train(1)
        life.until(lambda: life.uploaded > 0)
        life.ckpt.save()
        saved = life.ckpt.stats().iterations
        until(lambda: iteration_of(server.names()[0]) == saved)  # nothing is uploaded after that
        server.objects.remove([path for path in server.objects.sizes() if path.endswith("manifest.json")])
        assert not server.names()
    assert server.names() and life.uploads > 1 and not life.told


def test_the_bucket_is_out_and_training_goes_on(server: BucketServer, tmp_path: Path) -> None:
    """Told once when it begins and once when it is over; what is newest then is uploaded, and nothing in between."""
    with Life(tmp_path / "store", server.url) as life:
        life.ckpt.restore()
        life.until(lambda: life.uploaded > 0)
        server.out()
        life.until(lambda: bool(life.told))
        before = life.ckpt.stats().iterations
        missed = life.uploaded
        life.until(lambda: life.ckpt.stats().iterations >= before + 50)
        on_disk = life.ckpt.status().durable_iteration or 0
        server.back()
        life.until(lambda: life.uploaded >= on_disk)
    uploads = [event.iteration for event in life.events if isinstance(event, Uploaded)]
    between = [iteration for iteration in uploads if missed < iteration < on_disk]
    assert len(between) <= 1  # which was being tried when it came back
    assert len(life.told) == 2, life.told
    begins, over = life.told
    assert "cannot be uploaded" in begins and "while training goes on" in begins and len(begins.splitlines()) == 1
    assert "uploaded again, after" in over
    assert life.ckpt.status().errors == 0


def test_the_bucket_is_out_when_a_run_begins(server: BucketServer, tmp_path: Path) -> None:
    """The disk has a checkpoint: it goes on from there. It has none: nobody knows what is to be resumed."""
    with Life(tmp_path / "store", server.url) as life:
        life.train(3)
    server.out()
    with Life(tmp_path / "store", server.url, retry_s=0) as life:
        assert life.ckpt.restore() == 3
        assert "taken for the newest" in life.told[0]
        with pytest.raises(StoreError, match=r"not known whether it has a checkpoint; try again") as caught:
            Life(tmp_path / "empty", server.url)
        assert len(str(caught.value).splitlines()) == 1
        server.back()


def test_a_bucket_that_is_out_at_the_end_is_told(server: BucketServer, tmp_path: Path) -> None:
    """It is tried for retry_s. The next run uploads what the disk has."""
    with Life(tmp_path / "store", server.url, retry_s=0.5) as life:
        life.train(1)
        life.until(lambda: life.uploaded > 0)
        server.out()
        life.train(1)
        done = life.ckpt.stats().iterations
    assert "was tried for 0.5 s; the disk has it" in life.told[-1]
    server.back()
    with Life(tmp_path / "store", server.url) as life:
        assert life.ckpt.restore() == done
    assert server.names()[0].endswith(f"iteration-{done}")


@pytest.mark.parametrize("file", ["model.safetensors", "commit.json", MANIFEST])
def test_a_damaged_object_is_refused_and_an_older_checkpoint_taken(
    server: BucketServer, tmp_path: Path, file: str
) -> None:
    with Life(tmp_path / "one", server.url, persist_every=PersistEvery(seconds=3600)) as life:
        life.train(1)
        life.ckpt.save(keep=False)
        assert life.ckpt._behind is not None and life.ckpt._behind.wait(time.monotonic() + 60)
        life.train(3)
    new, old = server.names()
    damage(server, new, file)
    with Life(tmp_path / "other", server.url) as life:
        assert life.ckpt.restore() == 1
        (line,) = life.told
        assert f"skipped {new}: {file}: " in line
        assert [each.iteration for each in list_checkpoints(tmp_path / "other")] == [1]
    for name in (new, old):
        damage(server, name, "optimizer.safetensors")
    server.objects.remove([f"{name}/{MANIFEST}" for name in server.names() if name not in (new, old)])
    with pytest.raises(CorruptStoreError, match="no checkpoint verifies"):
        restored(tmp_path / "third", server.url)


def restored(store: Path, bucket: str) -> int:
    with Life(store, bucket) as life:
        return life.ckpt.restore()


def test_what_does_not_verify_on_disk_comes_from_the_bucket(server: BucketServer, tmp_path: Path) -> None:
    with Life(tmp_path / "store", server.url) as life:
        life.train(4)
        before = life.weights()
    for found in list_checkpoints(tmp_path / "store")[:1]:
        path = found.path / "model.safetensors"
        path.write_bytes(path.read_bytes()[:-1] + b"\x7f")
    with Life(tmp_path / "store", server.url) as life:
        assert life.ckpt.restore() == 4
        assert same(life.weights(), before)
        assert [line for line in life.said if "downloading" in line]


def test_retention_is_as_on_disk(server: BucketServer, tmp_path: Path) -> None:
    """With what was marked; nothing is left of what was removed."""
    with Life(tmp_path / "store", server.url, retention=Retention(last=2)) as life:
        life.train(1)
        life.ckpt.save(keep=True)
        life.until(lambda: life.uploaded > 8)
    kept = {"iteration-1", *(name.partition("-")[2] for name in server.names()[:2])}
    assert {name.partition("-")[2] for name in server.names()} == kept
    objects = {path.partition("/")[0] for path in server.objects.sizes()}
    assert objects == {*server.names(), "00000001.attempt", WRITTEN}


def test_two_runs_with_one_bucket_do_each_other_no_harm(server: BucketServer, tmp_path: Path) -> None:
    """The one that began later has it; the other is told, and goes on with its disk."""
    with Life(tmp_path / "one", server.url) as one:
        one.train(1)
        one.until(lambda: one.uploaded > 0)
        with Life(tmp_path / "other", server.url) as other:
            other.ckpt.restore()
            other.until(lambda: other.uploads >= Retention().last)  # so that nothing of the first run is retained
            one.until(lambda: bool(one.told))
            (line,) = one.told
            assert "another run uploads to it now (00000002.attempt says who)" in line
            one.train(5)
        assert len(one.told) == 1 and not other.told
    assert {name[0] for name in server.names()} == {"2"}
    contents = [newest(tmp_path / name).checkpoint for name in ("one", "other")]
    assert all(isinstance(found, Checkpoint) for found in contents)


def test_nothing_of_an_earlier_run_is_overtaken_unresumed(server: BucketServer, tmp_path: Path) -> None:
    """A bucket with checkpoints is as a store with them: restored first, or started over with the newest kept."""
    with Life(tmp_path / "one", server.url) as life:
        life.train(3)
    with Life(tmp_path / "other", server.url) as life:
        with pytest.raises(InputError, match="holds checkpoints of iterations 3"):
            life.train(1)
        assert life.ckpt.restore() == 3
    with Life(tmp_path / "third", server.url, start_over=True, retention=Retention(last=1)) as life:
        assert life.ckpt.restore() == 0
        life.until(lambda: life.uploaded > 2)
    assert [name.partition("-")[2] for name in server.names()][1:] == ["iteration-3"]


def test_what_is_of_another_training_does_not_stay_on_disk(server: BucketServer, tmp_path: Path) -> None:
    """A mistaken URL is mended by another URL."""
    with Life(tmp_path / "one", server.url) as life:
        life.train(1)
    model = torch.nn.Linear(7, 3)
    with checkflow.attach(
        model, torch.optim.AdamW(model.parameters()), store=tmp_path / "s", bucket=server.url
    ) as ckpt:
        with pytest.raises(InputError, match="model/weight: has shape"):
            ckpt.restore()
        assert not list_checkpoints(tmp_path / "s")
    server.anew()
    with checkflow.attach(
        model, torch.optim.AdamW(model.parameters()), store=tmp_path / "s", bucket=server.url
    ) as ckpt:
        assert ckpt.restore() == 0


def test_an_iteration_that_only_the_bucket_has(server: BucketServer, tmp_path: Path) -> None:
    with Life(tmp_path / "one", server.url) as life:
        life.train(2)
        life.ckpt.save(keep=True)
        life.train(3)
    with Life(tmp_path / "other", server.url) as life:
        assert life.ckpt.restore(2) == 2


PREEMPTED = """
import sys, time, torch, checkflow
model = torch.nn.Linear(6, 3)
optimizer = torch.optim.AdamW(model.parameters())
with checkflow.attach(model, optimizer, store=sys.argv[1], bucket=sys.argv[2]) as ckpt:
    for i in range(ckpt.restore(), 10**6):
        model(torch.randn(4, 6)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        ckpt.step()
        print(i + 1, flush=True)
        time.sleep(0.01)
"""


@pytest.mark.parametrize("sign", [signal.SIGTERM, signal.SIGKILL])
def test_an_ended_process_costs_no_completed_iteration(
    server: BucketServer, tmp_path: Path, sign: signal.Signals
) -> None:
    """Nor its disk: preempted, it has the last one in the bucket before it ends; killed, its uploader does that."""
    command = [sys.executable, "-c", PREEMPTED, str(tmp_path / "store"), server.url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 30:
                break
        process.send_signal(sign)
        done = [30, *map(int, process.stdout.read().split())][-1]
    if sign == signal.SIGKILL:
        deadline = time.monotonic() + 60
        while max(map(iteration_of, server.names()), default=0) < done - 1:
            assert time.monotonic() < deadline
            time.sleep(0.05)
    StoreLock.acquire(tmp_path / "store", lambda _: None).close()  # its saver has ended
    remove_written(tmp_path / "store")
    with Life(tmp_path / "other", server.url) as life:
        assert life.ckpt.restore() >= done - (sign == signal.SIGKILL)


@pytest.mark.parametrize(
    ("bucket", "says"),
    [
        ("s3://no-such-bucket/run", "NoSuchBucket; check its name, and the credentials in the environment"),
        ("nonsense", "give a URL such as s3://bucket/prefix"),
        ("memory:///run", "is this process's alone; give a URL such as s3://bucket/prefix"),
        ("s4://bucket/run", "give a URL such as s3://bucket/prefix"),
    ],
)
@pytest.mark.usefixtures("server")
def test_a_wrong_bucket_is_refused_in_a_line(tmp_path: Path, bucket: str, says: str) -> None:
    with pytest.raises(InputError) as caught:
        Life(tmp_path / "store", bucket)
    assert str(caught.value).startswith("bucket: ") and says in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_wrong_credentials_are_refused_in_a_line(tmp_path: Path) -> None:
    with bucket_server(INITIAL_NO_AUTH_ACTION_COUNT="1") as server, pytest.raises(InputError) as caught:
        Life(tmp_path / "store", server.url)
    assert "403 Forbidden InvalidAccessKeyId; check its name, and the credentials" in str(caught.value)
    assert len(str(caught.value).splitlines()) == 1


def test_a_bucket_that_hangs_holds_no_step_up(server: BucketServer, tmp_path: Path) -> None:
    """It takes connections and never answers: what training waits for is not more than it was."""
    with Life(tmp_path / "store", server.url) as life:
        life.until(lambda: life.uploaded > 0)
        server.hang()
        try:
            took = []
            for _ in range(150):
                began = time.monotonic()
                life.train(1)
                took.append(time.monotonic() - began)
                time.sleep(0.01)
        finally:
            server.go_on()
        missed = life.uploaded
        life.until(lambda: life.uploaded > missed + 50)
    assert max(took) < SMALL_S / 2 and not [line for line in life.told if "cannot" in line]


@pytest.mark.parametrize("store", ["s3://bucket/run", Path("s3://bucket/run")])
def test_the_disk_comes_first(store: str | Path) -> None:
    with pytest.raises(InputError, match=r'bucket="s3://bucket/prefix"'):
        checkflow.attach(*build(), store=store)


def test_the_command_lists_what_is_there(
    server: BucketServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    assert run(["list", server.url]) == 0
    assert "no checkpoint yet" in "".join(capfd.readouterr())
    with Life(tmp_path / "store", server.url) as life:
        life.train(1)
        life.ckpt.save(keep=True)
        life.train(2)
    name = server.names()[0]
    assert run(["list", server.url]) == 0
    shown = capfd.readouterr().out.splitlines()
    assert shown[1].startswith(name) and "retained for good" in shown[-1]
    server.objects.remove([f"{name}/model.safetensors"])
    assert run(["list", server.url, "--json"]) == 0
    rows = json.loads(capfd.readouterr().out)["checkpoints"]
    assert rows[0] == {"name": name, "iteration": 3, "wrong": "model.safetensors: is missing"}
    assert rows[-1]["iteration"] == 1 and rows[-1]["keep"]
    assert run(["list", "s3://no-such-bucket/run"]) == 2
    assert "NoSuchBucket" in capfd.readouterr().err


def test_commands_read_it_as_they_read_a_store(
    server: BucketServer, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """check compares every byte; export takes what is as it was written, and leaves nothing beside its output."""
    exported = tmp_path / "out" / ("n" * 255)
    asked = ["export", server.url, "--to", "safetensors", "-o", str(exported)]
    (tmp_path / "out").mkdir()
    assert run(["check", server.url]) == 0 and "no checkpoint yet" in capfd.readouterr().out
    assert run(asked) == 2 and "no checkpoint yet; nothing to export" in capfd.readouterr().err
    with Life(tmp_path / "store", server.url) as life:
        life.train(1)
        life.ckpt.save(keep=True)
        life.train(2)
    name, old = server.names()[0], server.names()[-1]
    assert run(["check", server.url]) == 0
    assert capfd.readouterr().out.splitlines()[0] == f"{name}: verified"
    assert run(["check", server.url, "--repair"]) == 2 and "from which nothing is removed" in capfd.readouterr().err
    assert run(asked) == 0
    on_disk = newest(tmp_path / "store").checkpoint
    assert on_disk is not None and iteration_of(name) == on_disk.iteration == 3
    for file in ("model.safetensors", "optimizer.safetensors"):
        assert (exported / file).read_bytes() == (on_disk.path / file).read_bytes()
    damage(server, name)
    capfd.readouterr()
    assert run(["check", server.url, "--json"]) == 1
    found = json.loads(capfd.readouterr().out)
    assert [wrong["name"] for wrong in found["wrong"]] == [name] and old in found["verified"]
    assert "block 0 is not what was written" in found["wrong"][0]["reason"]
    again = [*asked[:-1], str(tmp_path / "out" / "again")]
    assert run([*again, "--iteration", "3"]) == 1 and "no checkpoint verifies" in capfd.readouterr().err
    assert run([*again, "--iteration", "7"]) == 2
    assert "has no checkpoint of iteration 7; it has" in capfd.readouterr().err
    assert run(again) == 0 and f"skipped {name}" in capfd.readouterr().err
    assert json.loads((tmp_path / "out" / "again" / "commit.json").read_text())["iteration"] < 3
    assert {path.name for path in (tmp_path / "out").iterdir()} == {exported.name, "again"}


def test_what_will_be_restored_is_foreseen_from_there(server: BucketServer, tmp_path: Path) -> None:
    """As who resumes with a framework's trainer has to know before there is a model."""
    with Life(tmp_path / "one", server.url) as life:
        life.train(3)
    told: list[str] = []
    found = foreseen(tmp_path / "other", 60.0, Hearers(told.append, told.append), server.url)
    assert found is not None and found.iteration == 3
    assert any("downloading" in line for line in told)
    with Life(tmp_path / "other", server.url) as life:
        assert life.ckpt.restore() == 3
