"""System calls of trainer and saver that fail, wait, or end the process, by strace's injections."""

from __future__ import annotations

import os
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from random import Random

import trainer_to_kill

from torturing.bench import HANG_S, Bench, Life
from torturing.results import Outcome
from torturing.settings import SETTINGS
from torturing.trainer import Plan

RUNS = (5, 80)
ITERATIONS = 40  # of the life in which it happens
LATEST = 60  # the call of its name that is hit, at most
DELAY_US = 300_000
TRAINER = (
    "openat", "read", "pread64", "memfd_create", "ftruncate", "fallocate", "mmap", "munmap", "mprotect", "madvise",
    "socketpair", "pidfd_open", "fcntl", "clone", "clone3", "vfork", "sendto", "recvfrom", "recvmsg", "sendmsg", "poll",
    "ppoll", "mkdir", "fsync", "unlink", "pwrite64", "getdents64", "newfstatat", "fstat", "close", "pipe2", "wait4",
    "lseek", "write", "dup2", "sched_yield", "clock_nanosleep", "kill", "futex",
)  # fmt: skip
SAVER = (
    "openat", "read", "pread64", "preadv", "preadv2", "mmap", "mkdir", "fallocate", "pwrite64", "pwritev", "fsync",
    "sync_file_range", "fadvise64", "rename", "renameat2", "unlink", "unlinkat", "rmdir", "sendto", "recvfrom", "poll",
    "fcntl", "getdents64", "newfstatat", "fstat", "close", "clone3", "madvise", "ftruncate", "statx",
)  # fmt: skip
ERRORS = ("EIO", "ENOSPC", "EINTR", "EMFILE", "ENOMEM", "EAGAIN", "EACCES", "EROFS", "EDQUOT")
NO_ERRORS = frozenset({"munmap", "mprotect", "futex", "close", "wait4", "dup2", "sched_yield", "clock_nanosleep"})


def MISSING() -> str | None:
    path = shutil.which("strace")
    if path is None:
        return "strace is not installed"
    denied = subprocess.run([path, "-o", os.devnull, "true"], capture_output=True, check=False).returncode
    return "strace may not trace processes here" if denied else None


def run(bench: Bench, chance: Random, _: int) -> Iterator[Outcome]:
    """One injection, into one life of a store that holds a checkpoint; then a life to which nothing happens."""
    wrong = bench.finish(replace(bench.plan(), more=2))
    if wrong:
        yield Outcome("first life", identical=False, wrong=wrong)
        return
    of_trainer = chance.random() < 0.5
    call = chance.choice(TRAINER if of_trainer else SAVER)
    hit = f":when={chance.randrange(1, chance.choice((3, 10, LATEST)))}{chance.choice(('', '', '+', '+5'))}"
    kinds = ["signal=SIGKILL", f"delay_enter={DELAY_US}"] + ["error"] * (0 if call in NO_ERRORS else 4)
    kind = chance.choice(kinds)
    if kind.startswith("delay"):
        hit = hit.split("+")[0] + "+20"  # each would take for ever
    kind = f"error={chance.choice(ERRORS)}" if kind == "error" else kind
    trace = bench.folder / "trace"
    options = f"-f -qq -b execve -o {trace} -e trace={call} -e inject={call}:{kind}{hit}"
    setting = chance.choice(SETTINGS)
    plan = Plan(bench.schedule, bench.store, setting, more=ITERATIONS, saves=0.05)
    life = _of_trainer(bench, plan, options) if of_trainer else _of_saver(bench, plan, options)
    code = life.forked.wait(HANG_S)
    phase, entry = life.phase, life.entry()
    line, internal = life.trouble()
    life.forked.end()
    hits = trace.read_text(errors="replace").count("(INJECTED)") if trace.exists() else 0
    hits += kind.startswith(("signal", "delay")) and code is not None
    what = f"{'trainer' if of_trainer else 'saver'}'s {call} {kind}{hit}"
    wrong = bench.differs(life)
    if code is None:
        wrong = wrong or f"the trainer hangs while {phase.name.lower()}"
    elif code < 0 and code != -signal.SIGKILL:
        wrong = wrong or f"the trainer died of {signal.Signals(-code).name}"
    elif code == -signal.SIGKILL and not (of_trainer and kind == "signal=SIGKILL"):
        wrong = wrong or "the trainer was killed, though nobody killed it"
    if not bench.alone():
        wrong = wrong or "a saver does not end"
    if line and not line.startswith("checkflow: "):
        internal = line
    identical = not wrong if life.said() else None
    yield Outcome(what, identical, setting.name, wrong=wrong, rough=internal, note=line or f"{hits} hit")
    wrong = bench.finish(replace(bench.plan(), more=2), at_least=max(2, entry.durable))
    yield Outcome(f"finished after {what}", identical=not wrong, wrong=wrong)


def _of_saver(bench: Bench, plan: Plan, options: str) -> Life:
    """The saver runs below strace from its first instruction."""
    python = bench.folder / "python"
    strace = f"strace {options.replace('-b execve', '')}"
    python.write_text(f'#!/bin/sh\nexec {strace} {shlex.quote(sys.executable)} "$@"\n')
    python.chmod(0o755)

    def swap() -> None:
        sys.executable = str(python)

    return bench.live(replace(plan, before=swap))


def _of_trainer(bench: Bench, plan: Plan, options: str) -> Life:
    """The trainer waits until it is traced; what it starts is let go when it becomes another program."""

    def wait() -> None:
        training = trainer_to_kill.training()  # torch looks at the processor once: were that refused, it would add
        training.iteration()  # in another order, and the bytes would differ
        os.kill(os.getpid(), signal.SIGSTOP)

    life = bench.live(replace(plan, before=wait))
    while "T (stopped)" not in _status(life.forked.pid):
        time.sleep(0.001)
    tracer = subprocess.Popen(["strace", *shlex.split(options), "-p", str(life.forked.pid)], stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 10.0
    while "TracerPid:\t0" in _status(life.forked.pid) and tracer.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    os.kill(life.forked.pid, signal.SIGCONT)
    return life


def _status(pid: int) -> str:
    path = Path(f"/proc/{pid}/status")
    return path.read_text() if path.exists() else ""
