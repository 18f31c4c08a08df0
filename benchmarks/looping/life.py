"""One process's part of a loop: runs the script as its user does, and says what it does.

    python -m looping.life SCRIPT SAYS KEPT TURN ARGUMENT...

To the descriptor SAYS go lines: "b DIGEST" of what the model is given in training, "u" for each update. With a TURN of
n nothing is digested: after n updates their seconds go there, "t S S ...", and the script stands still until a byte
comes from stdin. In the end comes "end JSON": digests of the script's variables KEPT ("model,trainer.state") and of the
random generators, and what Checkpointer.stats() said.
"""

from __future__ import annotations

import atexit
import hashlib
import json
import logging
import os
import random
import runpy
import sys
import time
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import register_optimizer_step_post_hook

from checkflow.runtime.stats import Stats

_OF_TIME = ("_runtime", "_per_second")  # of a history's entries


def main() -> None:
    script, says, kept, turn, *arguments = sys.argv[1:]
    voice = Voice(int(says))
    atexit.register(voice.end)  # after checkflow's own, which is registered later
    torch.set_num_threads(1)
    random.seed(0)  # those that a script does not seed begin otherwise in each process
    np.random.seed(0)
    torch.manual_seed(0)
    if int(turn):
        register_optimizer_step_post_hook(Turns(voice, int(turn)).updated)
    else:
        register_optimizer_step_post_hook(lambda *_: voice.say("u"))
        Batches(voice)
    sys.argv = [script, *arguments]
    sys.path.insert(0, str(Path(script).parent))
    left = SimpleNamespace(**runpy.run_path(script, run_name="__main__"))
    voice.digests = {name: digest(attrgetter(name)(left)) for name in kept.split(",")}
    voice.digests["generators"] = digest([random.getstate(), np.random.get_state(), torch.get_rng_state()])


class Voice(logging.Handler):
    """What is said, and at the end of a script that came to its end, what it left."""

    def __init__(self, descriptor: int) -> None:
        super().__init__()
        self._descriptor = descriptor
        os.set_inheritable(descriptor, False)
        self.digests: dict[str, str] = {}
        self._stats: dict[str, int] = {}
        log = logging.getLogger("checkflow")
        log.setLevel(logging.INFO)
        log.propagate = False
        log.addHandler(self)

    def say(self, line: str) -> None:
        os.write(self._descriptor, f"{line}\n".encode())

    def emit(self, record: logging.LogRecord) -> None:
        """checkflow logs its stats when it closes."""
        for stats in record.args or ():
            if isinstance(stats, Stats):
                self._stats = {"stall_ns": stats.stall_per_iteration_ns, "learned_in": stats.learned_in}

    def end(self) -> None:
        if self.digests:
            self.say("end " + json.dumps({"digests": self.digests, "stats": self._stats}))


class Batches:
    """What the outermost module is given in training."""

    def __init__(self, voice: Voice) -> None:
        self._voice = voice
        self._depth = 0
        register_module_forward_pre_hook(self._begins)
        register_module_forward_hook(self._ended, with_kwargs=True, always_call=True)

    def _begins(self, _module: torch.nn.Module, _args: object) -> None:
        self._depth += 1

    def _ended(
        self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object], _output: object
    ) -> None:
        self._depth -= 1
        if self._depth == 0 and module.training:
            given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)]
            self._voice.say(f"b {digest(given)[:16]}")


class Turns:
    """The time of each iteration, from update to update; and a stop after so many."""

    def __init__(self, voice: Voice, size: int) -> None:
        self._voice, self._size = voice, size
        self._times_s: list[float] = []
        self._last_s = time.perf_counter()

    def updated(self, *_: object) -> None:
        now_s = time.perf_counter()
        self._times_s.append(now_s - self._last_s)
        self._last_s = now_s
        if len(self._times_s) == self._size:
            self._voice.say(f"t {' '.join(map(str, self._times_s))}")
            self._times_s.clear()
            sys.stdin.buffer.read(1)
            self._last_s = time.perf_counter()


def digest(value: object) -> str:
    content = hashlib.sha256()
    _add(content, value)
    return content.hexdigest()


def _add(content: hashlib._Hash, value: object) -> None:
    """Every byte. Raises TypeError for what it does not know, rather than leave it out."""
    if isinstance(value, torch.Tensor):
        content.update(f"{value.dtype}{tuple(value.shape)}".encode())
        content.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, np.ndarray):
        content.update(f"{value.dtype}{value.shape}".encode() + value.tobytes())
    elif isinstance(value, Mapping):
        content.update(f"{len(value)} of".encode())
        for key in sorted(value, key=str):
            if not str(key).endswith(_OF_TIME):
                content.update(repr(key).encode())
                _add(content, value[key])
    elif isinstance(value, (list, tuple)):
        content.update(f"{len(value)} in".encode())
        for each in value:
            _add(content, each)
    elif value is None or isinstance(value, (bool, int, float, str)):
        content.update(repr(value).encode())
    elif hasattr(value, "state_dict"):
        _add(content, value.state_dict())
    else:
        raise TypeError(f"{type(value).__name__}: how is it digested?")


if __name__ == "__main__":
    main()
