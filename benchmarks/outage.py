"""A bucket that is out for an hour, behind the store of a training that goes on, and of one that is killed meanwhile.

Two trainings upload what is newest on their disks to an object store on this machine, until nobody listens there any
more. One goes on; the other is killed after a third of the outage and started again, while the bucket is still out.
When it is back, how long until it has what is newest then? At the end both are killed, and each is resumed from the
bucket alone, on a disk that has nothing; what it restores is compared with what the killed one had at that iteration.

    python benchmarks/outage.py [--minutes 60]
"""

from __future__ import annotations

import argparse
import hashlib
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

import checkflow

HERE = Path(__file__).resolve()
EVERY_S = 0.5  # an iteration
PERSISTED_S = 5.0  # how often one is made durable
HEADINGS = (
    "training",
    "iterations",
    "step ms before",
    "while out",
    "files on disk",
    "uploads again",
    "resumed",
    "as it was",
)


@dataclass
class Life:
    """A training in a process of its own, and what it says of each iteration."""

    process: subprocess.Popen[str]
    steps_s: dict[int, float] = field(default_factory=dict)
    digests: dict[int, str] = field(default_factory=dict)
    uploaded: int = 0

    def listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            completed, step_s, uploaded, digest = line.split()
            self.uploaded = int(uploaded)
            self.digests[int(completed)] = digest
            if float(step_s):  # none was made before the one that it resumed
                self.steps_s[int(completed)] = float(step_s)

    def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        self.process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=60.0, help="that the bucket is out")
    parser.add_argument("--train", nargs=3, metavar=("STORE", "BUCKET", "ITERATIONS"), help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.train:
        train(chosen.train[0], chosen.train[1], int(chosen.train[2]))
        return
    sys.path.insert(0, str(HERE.parent.parent / "tests"))
    from bucket_server import bucket_server  # the same that the tests have

    table = Table(*HEADINGS, box=None)
    with tempfile.TemporaryDirectory() as folder, bucket_server() as server:
        stores = {name: (Path(folder, name), f"{server.url}-{name.split()[0]}") for name in ("goes on", "is killed")}
        lives = {name: [begun(*at)] for name, at in stores.items()}
        until(lambda: all(its[0].uploaded > 20 for its in lives.values()))
        files = {name: count(store) for name, (store, _) in stores.items()}
        began = {name: last(its) for name, its in lives.items()}
        server.out()
        print(f"the bucket is out for {chosen.minutes:g} minutes", file=sys.stderr)
        time.sleep(chosen.minutes * 20)
        lives["is killed"][0].kill()
        lives["is killed"].append(begun(*stores["is killed"]))
        time.sleep(chosen.minutes * 40)
        ended = {name: last(its) for name, its in lives.items()}
        server.back()
        back, again_s = time.monotonic(), dict[str, float]()
        while len(again_s) < len(lives):
            for name, its in lives.items():
                if its[-1].uploaded >= ended[name] and name not in again_s:
                    again_s[name] = time.monotonic() - back
            time.sleep(0.1)
        for name, its in lives.items():
            its[-1].kill()
            store, bucket = stores[name]
            after = begun(store.with_name(f"{name}, another machine"), bucket, 0)
            until(partial(bool, after.digests))
            after.process.wait()
            resumed, digest = next(iter(after.digests.items()))
            steps_s = {i: s for life in its for i, s in life.steps_s.items()}
            before, out = ([s for i, s in steps_s.items() if (i > began[name]) == is_out] for is_out in (False, True))
            before_ms, out_ms = (f"{statistics.median(each) * 1e3:.2f}" for each in (before, out))
            table.add_row(
                name, f"{began[name]} to {ended[name]}", before_ms, out_ms, f"{files[name]} to {count(store)}",
                f"after {again_s[name]:.1f} s", f"{resumed} of {last(its)}",
                "yes" if digest == its[-1].digests[resumed] else "NO",
            )  # fmt: skip
    Console(width=140).print(table)


def train(store: str, bucket: str, iterations: int) -> None:
    """Say of each iteration, from the restored one on, how long its step() took, which is uploaded, and a digest of the
    parameters."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(256, 512), torch.nn.ReLU(), torch.nn.Linear(512, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    often = checkflow.PersistEvery(seconds=PERSISTED_S)
    with checkflow.attach(model, optimizer, store=store, bucket=bucket, persist_every=often) as ckpt:
        completed, step_s = ckpt.restore(), 0.0
        while True:
            digest = hashlib.sha256(b"".join(p.detach().numpy().tobytes() for p in model.parameters())).hexdigest()
            print(completed, step_s, ckpt.status().uploaded_iteration or 0, digest, flush=True)
            if completed >= iterations:
                return
            model(torch.randn(8, 256)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            began = time.perf_counter()
            ckpt.step()
            completed, step_s = completed + 1, time.perf_counter() - began
            time.sleep(EVERY_S)


def begun(store: Path, bucket: str, iterations: int = 10**9) -> Life:
    command = [sys.executable, str(HERE), "--train", str(store), bucket, str(iterations)]
    life = Life(subprocess.Popen(command, stdout=subprocess.PIPE, text=True))
    threading.Thread(target=life.listen, daemon=True).start()
    return life


def last(lives: list[Life]) -> int:
    return max(lives[-1].digests, default=0)


def count(store: Path) -> int:
    return sum(path.is_file() for path in store.rglob("*"))


def until(reached: Callable[[], bool]) -> None:
    while not reached():
        time.sleep(0.1)


if __name__ == "__main__":
    main()
