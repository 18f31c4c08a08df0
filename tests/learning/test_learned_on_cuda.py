"""A schedule that is learned on CUDA, by each policy and in each way to run an iteration."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from slow_link import asking
from test_attach_learning import attached, same, until_learned
from test_learned_policies import CARRIED, until_learned_anew
from torch import nn
from torch.utils.checkpoint import checkpoint

import checkflow
from checkflow.learning.messages import IN_PARTS, POLICIES
from checkflow.learning.planner import Planner

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),  # by its compiler
]

WIDTH, ROWS = 512, 32


@pytest.fixture(autouse=True)
def slow_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "ask", asking(CARRIED))


@pytest.fixture(autouse=True)
def the_same_bits_each_time(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


class Cuda:
    """A training as a script has it, with dropout, and so large that its copies are on their way for a while."""

    def __init__(self, **options: Any) -> None:
        torch.manual_seed(0)
        blocks = [nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH)) for _ in range(3)]
        self.model = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH), nn.Dropout(0.1), nn.Linear(WIDTH, 8)).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, **options)
        self.given: dict[str, Any] = {}

    def batch(self, number: int) -> torch.Tensor:
        return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number)).cuda()

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.model(x).square().mean()
        return found

    def iterate(self, number: int) -> None:
        torch.autograd.backward(self.loss(self.batch(number)))
        self.optimizer.step()
        self.optimizer.zero_grad()

    def state(self) -> list[torch.Tensor]:
        slots = [value for state in self.optimizer.state.values() for _, value in sorted(state.items())]
        tensors = [*self.model.state_dict().values(), *slots, torch.cuda.get_rng_state()]
        return [tensor.cpu().clone() for tensor in tensors]


class Scaled(Cuda):
    """Half precision with a scale: the first updates are skipped."""

    def __init__(self) -> None:
        super().__init__(fused=True)
        self.scaler = torch.amp.GradScaler("cuda", init_scale=2.0**40, growth_interval=20)
        self.given = {"scaler": self.scaler}

    def iterate(self, number: int) -> None:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = self.loss(self.batch(number))
        torch.autograd.backward(self.scaler.scale(loss))
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()


class Recomputed(Cuda):
    def loss(self, x: torch.Tensor) -> torch.Tensor:
        y = x.requires_grad_()
        for block in self.model:
            y = checkpoint(block, y, use_reentrant=False) if len(list(block.children())) else block(y)
        return y.square().mean()


class Compiled(Cuda):
    def __init__(self) -> None:
        super().__init__(fused=True)
        self._ran = torch.compile(self.model)

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self._ran(x).square().mean()
        return found


class InBackward(Cuda):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""

    def __init__(self) -> None:
        super().__init__()
        of = {p: torch.optim.AdamW([p], lr=1e-3, foreach=False) for p in self.model.parameters()}
        self.optimizers = list(of.values())

        def update(parameter: torch.Tensor) -> None:
            of[parameter].step()  # type: ignore[index]
            of[parameter].zero_grad()  # type: ignore[index]

        for parameter in self.model.parameters():
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def iterate(self, number: int) -> None:
        torch.autograd.backward(self.loss(self.batch(number)))

    def state(self) -> list[torch.Tensor]:
        slots = [value for o in self.optimizers for state in o.state.values() for _, value in sorted(state.items())]
        return [tensor.cpu().clone() for tensor in (*self.model.state_dict().values(), *slots)]


@dataclass
class _Graphed:
    """An iteration that was captured, and what it reads."""

    graph: torch.cuda.CUDAGraph = field(default_factory=torch.cuda.CUDAGraph)
    x: torch.Tensor = field(default_factory=lambda: torch.zeros(ROWS, WIDTH, device="cuda"))


class Replayed(Cuda):
    """The whole iteration is a CUDA graph, from the fourth one of each start on."""

    def __init__(self) -> None:
        super().__init__(capturable=True)
        self._graphed: _Graphed | None = None
        self._eager = 0

    def iterate(self, number: int) -> None:
        if self._graphed is None and self._eager < 3:
            self._eager += 1
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                super().iterate(number)
            torch.cuda.current_stream().wait_stream(side)
            return
        if self._graphed is None:
            self._graphed = _Graphed()
            with torch.cuda.graph(self._graphed.graph):
                torch.autograd.backward(self.loss(self._graphed.x))
                self.optimizer.step()
                self.optimizer.zero_grad()
        self._graphed.x.copy_(self.batch(number))
        self._graphed.graph.replay()


class CapturedBefore(Cuda):
    """Forward and backward are a CUDA graph from before attach on, which writes the running statistics unseen."""

    def __init__(self) -> None:
        super().__init__(foreach=True)
        side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for number in range(3):
                super().iterate(number)
        torch.cuda.current_stream().wait_stream(side)
        self._graphed = _Graphed()
        with torch.cuda.graph(self._graphed.graph):
            torch.autograd.backward(self.loss(self._graphed.x))

    def iterate(self, number: int) -> None:
        self._graphed.x.copy_(self.batch(number))
        self._graphed.graph.replay()
        self.optimizer.step()


WAYS: dict[str, Callable[[], Cuda]] = {
    "looped": lambda: Cuda(foreach=False),
    "foreach": lambda: Cuda(foreach=True),
    "fused": lambda: Cuda(fused=True),
    "capturable": lambda: Cuda(capturable=True),
    "scaled": Scaled,
    "recomputed": lambda: Recomputed(foreach=True),
    "compiled": Compiled,
    "in_backward": InBackward,
    "replayed": Replayed,
    "captured before": CapturedBefore,
}
PAIRS = [(policy, way) for policy in POLICIES for way in ("foreach", "fused")]
PAIRS += [("checkfreq", way) for way in ("compiled", "replayed", "captured before")]
PAIRS += [(policy, way) for policy in ("checkflow", "rolling") for way in WAYS if way not in ("foreach", "fused")]


def _train(loop: Cuda, store: Path, stop: int, told: list[str], policy: str) -> str:
    """On from where the store is, to an iteration; the policy of what was followed in the end."""
    optimizers = getattr(loop, "optimizers", loop.optimizer)
    given: dict[str, Any] = {"when_full": "wait", "persist_every": checkflow.PersistEvery(iterations=1)}
    given |= {"tell": told.append, "notify": told.append, "policy": policy} | loop.given
    with checkflow.attach(loop.model, optimizers, store=store, **given) as ckpt:
        for number in range(ckpt.restore(), stop):
            deadline = time.monotonic() + 60
            while number >= 20 and ckpt.learning == "planning" and time.monotonic() < deadline:
                time.sleep(0.01)
            loop.iterate(number)
            ckpt.step()
        return ckpt.schedule.policy


@pytest.mark.parametrize(("policy", "way"), PAIRS)
def test_what_is_learned_on_cuda_resumes_as_if_nothing_had_stopped_it(tmp_path: Path, policy: str, way: str) -> None:
    """While it learns, right after, and at each lane."""
    told, followed = list[str](), ""
    plain = WAYS[way]()
    for number in range(44):
        plain.iterate(number)
    loop = plain
    for stop in (2, 30, 31, 33, 44):
        loop = WAYS[way]()
        followed = _train(loop, tmp_path / "store", stop, told, policy)
    assert same(plain.state(), loop.state()), told
    if way in ("looped", "foreach", "fused", "capturable", "recomputed") and policy != "lowdiff_plus":
        assert followed == policy, told
        anew = [line for line in told if "learns its schedule anew" in line]
        assert all("the link carries" in line for line in anew), anew  # more than the planner was told


@pytest.mark.parametrize("policy", ["checkflow", *(policy for policy in IN_PARTS if policy != "lowdiff_plus")])
def test_what_is_followed_on_cuda_does_not_notice_that_it_is_learned_anew(tmp_path: Path, policy: str) -> None:
    """An iteration is recorded while checkpoints go on as they were, guarded within its update."""
    loop, told = Cuda(foreach=True), list[str]()
    with attached(loop, tmp_path / "store", told, policy=policy) as ckpt:  # type: ignore[arg-type]
        done = until_learned(ckpt, loop.iterate)
        for _ in range(2):
            done = until_learned_anew(ckpt, loop, done)  # type: ignore[arg-type]
        stats = ckpt.stats()
        assert stats.skipped == stats.discarded == 0
    assert not any("whole" in line for line in told), told
    again = Cuda(foreach=True)
    with attached(again, tmp_path / "store", policy=policy) as ckpt:  # type: ignore[arg-type]
        assert ckpt.restore() == done
    assert same(loop.state(), again.state())


def test_what_updates_a_replica_says_how_far_it_is_from_cuda(tmp_path: Path) -> None:
    """The host rounds otherwise: then checkpoints are read as a whole, and none is wrong."""
    loop, told = Cuda(foreach=True), list[str]()
    _train(loop, tmp_path / "store", 60, told, "lowdiff_plus")
    again = Cuda(foreach=True)
    assert _train(again, tmp_path / "store", 60, told, "lowdiff_plus")
    assert same(loop.state(), again.state()), told
