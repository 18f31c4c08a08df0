"""Several iterations for one checkpoint, on real trainings: bit-identical, or it is told why there are none."""

from __future__ import annotations

import itertools
import json
import re
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from slow_link import copies_take
from torch import nn
from trainings_to_resume import TRAININGS, Make, Run, Small, adamw, batch, sgd, simple

import checkflow
from checkflow.cli import run as run_command
from checkflow.errors import DeviceError, FormatError, InputError
from checkflow.graph import Graph
from checkflow.lower import lower
from checkflow.plan import Infeasible, Problem, on_anchors, problem_of
from checkflow.plan.rebuilt import in_lanes, over_iterations
from checkflow.plan.streaming.planner import plan_streaming
from checkflow.runtime import compiled, follower
from checkflow.runtime.device import Batch, Snapshot
from checkflow.runtime.host import HostDevice
from checkflow.schedule import Schedule
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import parse_record
from checkflow.state.live import live_state
from checkflow.state.names import file_of
from checkflow.state.restore.rebuild import whole
from checkflow.store.format.reader import load_newest
from checkflow.store.format.tensor_file import contents_of
from checkflow.torch_internals import unhooked_step
from checkflow.trace import trace_training
from checkflow.training import Training
from checkflow.verify import verify

ITERATIONS = 9
WHOLE = {  # no gradient rebuilds their state
    "scaler, fused": "its gradients are unscaled within the update",
    "calm scaler, fused": "the same",
    "counted": "its optimizer is none of torch's, whose updates alone are made again",
}


def begun(make: Make) -> Run:
    torch.manual_seed(7)
    np.random.seed(7)
    return make()


def traced(make: Make) -> Graph:
    def factory() -> Training:
        run = begun(make)
        return replace(run.training, iteration=lambda: next(run.steps))

    graph = trace_training(factory, model="parts", cuda_defaults=False, real=True).graph
    return graph.retimed("even", [1000] * graph.steps)


def in_parts(graph: Graph, interval: int) -> Schedule:
    """For a link that carries state and gradients with ease; also where to save all at the end takes less memory."""
    return planned(graph, lambda whole: over_iterations(whole, graph, interval), "gockpt")


def rolling(graph: Graph, lanes: int, *, ease: float = 2.0) -> Schedule:
    """A checkpoint each iteration, a part of it in each; as a whole where no gradient rebuilds any of it."""
    return planned(graph, lambda whole: in_lanes(whole, graph, lanes) or whole, "rolling", ease=ease)


def lowdiff(graph: Graph, lanes: int) -> Schedule:
    """The same with the whole state in one of these iterations, and gradients alone in the others."""
    return planned(graph, lambda whole: in_lanes(whole, graph, lanes, base=True) or whole, "lowdiff")


def planned(graph: Graph, parted: Callable[[Problem], Problem], policy: str, *, ease: float = 2.0) -> Schedule:
    """`ease`: how many times the state the link carries in an iteration."""
    state_bytes = sum(tensor.size_bytes for tensor in graph.tensors if tensor.role.is_state)
    bandwidth = round(ease * state_bytes * 10**9) // graph.iteration_time_ns
    problem = parted(on_anchors(problem_of(graph, bandwidth_bytes_per_s=bandwidth), graph))
    plan = plan_streaming(problem)
    assert not isinstance(plan, Infeasible)
    schedule = lower(plan, problem, graph, bandwidth_bytes_per_s=bandwidth, policy=policy)
    verify(schedule, graph)
    return schedule


Parted = Callable[[Graph, int], Schedule]
BOTH = pytest.mark.parametrize("parted", [in_parts, rolling])


def attached(
    run: Run, schedule: Schedule, store: Path, notify: Callable[[str], None], *, approximate: bool = False
) -> checkflow.Checkpointer:
    objects = run.objects.objects
    return checkflow.attach(
        run.training.model,
        run.training.optimizer,
        store=store,
        schedule=schedule,
        approximate=approximate,
        scheduler=[found for name, found in objects.items() if name.startswith("scheduler")] or None,
        scaler=objects.get("scaler"),
        generators=run.objects.generators,
        when_full="wait",
        persist_every=checkflow.PersistEvery(iterations=1),
        retention=checkflow.Retention(last=100),
        notify=notify,
        tell=lambda _: None,
    )


def state_of(run: Run) -> list[object]:
    """All that a resume has to bring back, in bytes."""
    found: list[object] = [torch.get_rng_state().numpy().tobytes()]
    entries = [entry for model in run.training.models for entry in model.state_dict().values()]
    tensors = [entry for entry in entries if isinstance(entry, torch.Tensor)]
    found += [entry for entry in entries if not isinstance(entry, torch.Tensor)]
    for optimizer in run.training.optimizers:
        for group in optimizer.param_groups:
            found.append([(key, str(value)) for key, value in group.items() if key != "params"])
            for parameter in group["params"]:
                state = optimizer.state.get(parameter, {})
                found.append(sorted(state))
                tensors += [state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor)]
                found += [state[key] for key in sorted(state) if not isinstance(state[key], torch.Tensor)]
    found += [tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes() for tensor in tensors]
    return found


def trained(make: Make, schedule: Schedule, store: Path) -> tuple[dict[int, list[object]], list[str]]:
    """The state after each iteration, and what was told."""
    told: list[str] = []
    run = begun(make)
    with attached(run, schedule, store, told.append) as ckpt:
        assert ckpt.restore() == 0
        expected = {}
        for iteration in range(1, ITERATIONS + 1):
            next(run.steps)
            expected[iteration] = state_of(run)
            ckpt.step()
    return expected, told


def records(store: Path) -> dict[int, dict[str, object]]:
    """Of the checkpoints, by iteration."""
    found = {}
    for path in store.glob("*-iteration-*"):
        found[int(path.name.rpartition("-")[2])] = json.loads((path / "commit.json").read_text())
    return found


def check_each(make: Make, schedule: Schedule, store: Path, expected: dict[int, list[object]]) -> None:
    """Checkpoints bring back the state of their iteration into another start of the training: of many the last four."""
    run = begun(make)
    with attached(run, schedule, store, lambda _: None) as ckpt:
        for iteration in sorted(records(store))[-4:]:
            for parameter in run.training.models[0].parameters():
                with torch.no_grad():
                    parameter.add_(1)
            assert ckpt.restore(iteration) == iteration
            assert state_of(run) == expected[iteration], f"iteration {iteration} differs"
            check_whole(run, store, iteration)


def check_whole(run: Run, store: Path, iteration: int) -> None:
    """Without its training the same checkpoint becomes the same state, which is the training's now."""
    loaded = load_newest(store, iteration).loaded
    assert loaded is not None
    found = whole(loaded.files, loaded.record)
    assert not found.differs and parse_record(found.record).replay is None
    files = {name: contents_of(name, data) for name, data in found.files.items()}
    compared: set[tuple[str, str]] = set()
    for live in live_state(run.training):
        contents = files[file_of(live.name.holder)]
        stored = contents.tensors.get(contents.aliases.get(live.name.path, live.name.path))
        if stored is not None:
            data = live.tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            assert bytes(stored.data) == data, f"{live.name} of iteration {iteration} differs"
            compared.add((live.name.holder, stored.name))
    assert len(compared) == sum(len(contents.tensors) for contents in files.values())


EACH_WAY = [(in_parts, 2), (in_parts, 3), (rolling, 3)]
LOWDIFF = ("sgd", "adamw foreach", "scheduler two", "scaler", "several")


@pytest.mark.parametrize(
    ("name", "parted", "count"),
    [
        *((name, *way) for name in TRAININGS if name != "lbfgs" for way in EACH_WAY),
        *((name, lowdiff, 4) for name in LOWDIFF),
    ],
)
def test_a_checkpoint_in_parts_is_bit_identical(name: str, parted: Parted, count: int, tmp_path: Path) -> None:
    """Each optimizer, scheduler, accumulation, scaler; two optimizers, of which one makes an update now and then."""
    make = TRAININGS[name]
    schedule = parted(traced(make), count)
    expected, told = trained(make, schedule, tmp_path / "store")
    replayed = [iteration for iteration, record in records(tmp_path / "store").items() if "replay" in record]
    if name in WHOLE:
        assert not replayed
    else:
        assert replayed and not told
    check_each(make, schedule, tmp_path / "store", expected)


Change = Callable[[nn.Module, torch.optim.Optimizer, int], None]


def updated(_net: nn.Module, optimizer: torch.optim.Optimizer, _iteration: int) -> None:
    optimizer.step()


def small(
    change: Change,
    *,
    zeroed: str = "",
    update: Change = updated,
    kind: type[torch.optim.AdamW] = torch.optim.AdamW,
    hooked: Callable[[torch.optim.Optimizer], object] = lambda _: None,
) -> Make:
    """A training of which something is done beside its updates. `zeroed`: gradients are, in place, "before" backward or
    "after" the update; "": they go. `hooked`: the optimizer is, before anything is attached."""

    def make() -> Run:
        net = Small()
        optimizer = kind(net.parameters(), lr=0.01, foreach=True)
        hooked(optimizer)
        run = Run(Training(net, optimizer, lambda: None), HostObjects.of(), iter(()))

        def steps() -> Iterator[None]:
            count = 0
            while True:
                x, y = batch()
                if zeroed != "after":
                    optimizer.zero_grad(set_to_none=not zeroed)
                torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
                count += 1
                update(net, optimizer, count)
                if zeroed == "after":
                    optimizer.zero_grad(set_to_none=False)
                change(net, optimizer, count)
                yield

        run.steps = steps()
        return run

    return make


def nothing(_net: nn.Module, _optimizer: torch.optim.Optimizer, _iteration: int) -> None:
    """No change."""


def clamped(net: nn.Module, _optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """Weights are clipped after an update, as a critic's are."""
    if iteration >= 5:
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.clamp_(-0.02, 0.02)


def twice(_net: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    if iteration >= 5:
        optimizer.step()


def loaded(net: nn.Module, _optimizer: torch.optim.Optimizer, iteration: int) -> None:
    if iteration == 5:
        net.load_state_dict({name: tensor * 0.5 for name, tensor in net.state_dict().items()})


def averaged(net: nn.Module, _optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """Weights are averaged over ranks by hand. A collective counts as little as `.data` does."""
    if iteration == 5:
        for parameter in net.parameters():
            parameter.data.mul_(0.5)


@BOTH
@pytest.mark.parametrize(
    ("change", "why"),
    [
        (averaged, "what AdamW updates is written by something else, and counted nowhere"),
        (clamped, "is written by something else than its optimizer's update"),
        (twice, "several updates in one iteration"),
        (loaded, "is written by something else than its optimizer's update"),
    ],
)
def test_what_an_update_does_not_make_is_read_as_a_whole(
    change: Callable[[nn.Module, torch.optim.Optimizer, int], None], why: str, parted: Parted, tmp_path: Path
) -> None:
    """It was not so when it was traced. It is told once, and no checkpoint is wrong."""
    schedule = parted(traced(small(nothing)), 3)
    expected, told = trained(small(change), schedule, tmp_path / "store")
    assert len(told) == 1 and why in told[0] and "\n" not in told[0]
    found = records(tmp_path / "store")
    assert "replay" not in found[6] or "replay" not in found[9]
    check_each(small(change), schedule, tmp_path / "store", expected)


def raising(_net: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """An update raises before it wrote anything, and training goes on."""
    if iteration != 5:
        optimizer.step()
        return

    def fails(*_: object) -> None:
        raise RuntimeError("no update")

    optimizer._init_group = fails  # type: ignore[attr-defined]
    with pytest.raises(RuntimeError, match="no update"):
        optimizer.step()
    del optimizer._init_group  # type: ignore[attr-defined]


def halved(optimizer: torch.optim.Optimizer, _args: object, _kwargs: object) -> None:
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            parameter.grad = parameter.grad * 0.5


def hooked_late(_net: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    """By who finds out that gradients are to be clipped when they are there."""
    handle = optimizer.register_step_pre_hook(halved) if iteration == 5 else None
    optimizer.step()
    if handle is not None:
        handle.remove()


def hooked_between(_net: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
    if iteration == 5:
        optimizer.register_step_pre_hook(halved)


def clamps(optimizer: torch.optim.Optimizer) -> None:
    count = iter(range(1, 1000))

    def clamp(*_: object) -> None:
        if next(count) == 5:
            clamped(nn.ParameterList(optimizer.param_groups[0]["params"]), optimizer, 5)

    optimizer.register_step_post_hook(clamp)


class Own(torch.optim.AdamW):
    """Its update of a parameter may depend on the others, now and then."""

    def step(self, _closure: object = None) -> None:  # type: ignore[override]
        largest = max(float(p.grad.abs().max()) for group in self.param_groups for p in group["params"])
        if largest < 1e9:
            torch.optim.AdamW.step.__wrapped__(self)  # type: ignore[attr-defined]


@BOTH
@pytest.mark.parametrize(
    ("make", "why"),
    [
        (small(nothing, update=raising), "an update was begun, and raised"),
        (small(nothing, update=hooked_late), "was registered in the middle of an iteration"),
        (small(nothing, hooked=clamps), "is written by something else than its optimizer's update"),
    ],
    ids=["raises", "hooked late", "post-hook"],
)
def test_what_hooks_and_errors_do_to_an_update_is_told(make: Make, why: str, parted: Parted, tmp_path: Path) -> None:
    """Now and then, so that the proof of the first checkpoints does not see it."""
    schedule = parted(traced(small(nothing)), 3)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == 1 and why in told[0], told
    check_each(make, schedule, tmp_path / "store", expected)


@BOTH
def test_a_hook_that_is_registered_between_iterations_runs_before_gradients_leave(
    parted: Parted, tmp_path: Path
) -> None:
    make = small(hooked_between)
    schedule = parted(traced(small(nothing)), 3)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told
    check_each(make, schedule, tmp_path / "store", expected)


def test_an_update_that_is_not_torchs_own_is_not_made_again(tmp_path: Path) -> None:
    make = small(nothing, kind=Own)
    schedule = rolling(traced(small(nothing)), 3)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == 1 and "updates of Own are none of torch's own" in told[0], told
    check_each(make, schedule, tmp_path / "store", expected)


def test_what_is_passed_over_is_not_saved_by_hand_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Other ranks hear that there will be none of an iteration when nobody can save it any more."""
    passed: list[int] = []
    monkeypatch.setattr(
        "checkflow.store.trainer.handle.StoreHandle.skipped", lambda _, iteration: passed.append(iteration)
    )
    schedule = rolling(traced(small(nothing)), 3)
    run, told = begun(small(clamped)), list[str]()
    with attached(run, schedule, tmp_path / "store", told.append) as ckpt:
        ckpt.restore()
        saved = []
        for iteration in range(1, 15):
            next(run.steps)
            ckpt.step()
            if iteration == 10:
                ckpt.save()
                saved = [*passed]
    assert len(told) == 1 and "is written by something else" in told[0]
    assert saved and max(saved) < 10 and 10 not in passed
    assert {11, 13} & set(passed) and not {9, 12} & set(passed)


@pytest.mark.parametrize("late_s", [0.0, 0.02])
@pytest.mark.parametrize("zeroed", ["before", "after"])
@pytest.mark.parametrize("parted", [in_parts, partial(rolling, ease=0.6)])
def test_gradients_zeroed_in_place_have_left_before(
    parted: Parted, zeroed: str, late_s: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or are copied, also where the link is slower than planned."""
    make = small(nothing, zeroed=zeroed)
    schedule = parted(traced(make), 3)
    assert schedule.gradients and all(row.until for row in schedule.gradients)
    if late_s:
        copies_take(monkeypatch, lambda _: late_s)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told
    assert any("replay" in record for record in records(tmp_path / "store").values())
    check_each(make, schedule, tmp_path / "store", expected)


@contextmanager
def zeroed_before_they_leave(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Make, threading.Event]]:
    """A training that zeroes gradients of its eighth iteration after the update, uncounted, and what copies wait for
    that are asked for as the ninth ends."""
    waiting: set[int] = set()  # addresses of gradients that are zeroed before they are copied
    are_zeroed, is_over, may_leave = threading.Event(), threading.Event(), threading.Event()

    def until(batch: Batch) -> float:
        if waiting & {copy.source.data_ptr() for copy in batch}:
            are_zeroed.wait(60)
        if is_over.is_set():
            may_leave.wait(60)
        return 0.0

    def held(net: nn.Module, optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if iteration == 8:
            waiting.update(found.grad.data_ptr() for found in net.parameters() if found.grad is not None)
        optimizer.step()

    def zeroed(net: nn.Module, _optimizer: torch.optim.Optimizer, iteration: int) -> None:
        if iteration == 8:
            for parameter in net.parameters():
                assert parameter.grad is not None
                parameter.grad.data.zero_()
            are_zeroed.set()
            waiting.clear()
        if iteration == ITERATIONS:
            is_over.set()

    copies_take(monkeypatch, until)
    try:
        yield small(zeroed, update=held), may_leave
    finally:
        may_leave.set()


@pytest.mark.parametrize("parted", [in_parts, rolling, lowdiff])
def test_gradients_zeroed_uncounted_before_they_have_left_are_told(
    parted: Parted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No checkpoint has what was written there; where it was the last one that is saved once more, as the run ends."""
    schedule = parted(traced(small(nothing)), 3)
    with zeroed_before_they_leave(monkeypatch) as (make, may_leave):
        run, told, expected = begun(make), list[str](), dict[int, list[object]]()
        with attached(run, schedule, tmp_path / "store", told.append) as ckpt:
            assert ckpt.restore() == 0
            for iteration in range(1, ITERATIONS + 1):
                next(run.steps)
                expected[iteration] = state_of(run)
                ckpt.step()
            may_leave.set()
        assert len(told) == 1 and "gradients or their factors are written before they have left" in told[0], told
        assert max(records(tmp_path / "store")) == ITERATIONS
        check_each(make, schedule, tmp_path / "store", expected)


@pytest.mark.parametrize("parted", [in_parts, rolling, partial(rolling, ease=0.6), lowdiff])
def test_the_next_iteration_may_write_gradients_elsewhere(
    parted: Parted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches are iterations: each third makes an update, and the one after it zeroes, which no counter sees."""

    def make(*, of_update: bool = False) -> Run:
        run = small(nothing)()
        (net,), (optimizer,) = run.training.models, run.training.optimizers

        def steps() -> Iterator[None]:
            count = 0
            while True:
                if count % 3 == 0 and not of_update:
                    for parameter in net.parameters():
                        if parameter.grad is not None:
                            parameter.grad.data.zero_()
                x, y = batch()
                torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
                count += 1
                if count % 3 == 0 or of_update:
                    optimizer.step()
                yield

        run.steps = steps()
        return run

    schedule = parted(traced(partial(make, of_update=True)), 3)
    assert schedule.gradients and all(row.until for row in schedule.gradients)
    copies_take(monkeypatch, lambda _: 0.01)
    expected, _ = trained(make, schedule, tmp_path / "store")
    check_each(make, schedule, tmp_path / "store", expected)


@pytest.mark.parametrize("parted", [in_parts, rolling, lowdiff])
@pytest.mark.parametrize("how", ["order", "dtype", "flush"])
def test_what_an_update_is_given_otherwise_from_some_iteration_on_is_told(
    how: str, parted: Parted, tmp_path: Path
) -> None:
    """A gradient that lies in memory, or is of a type, as its parameter does not; arithmetic without small numbers."""

    def make() -> Run:
        kind = torch.bfloat16 if how == "dtype" else torch.float32
        made = nn.Linear(24, 24).to(kind)
        optimizer = torch.optim.Adafactor(made.parameters()) if how == "order" else sgd(list(made.parameters()))

        def steps() -> Iterator[None]:
            for count in itertools.count():
                if count == ITERATIONS - 2:
                    torch.set_flush_denormal(how == "flush")
                if count >= ITERATIONS - 2 and how == "dtype":
                    for parameter in made.parameters():
                        parameter.grad_dtype = torch.float32
                torch.autograd.backward(made(torch.randn(4, 24, dtype=kind)).square().mean())
                if count >= ITERATIONS - 2 and how == "order":
                    assert made.weight.grad is not None
                    made.weight.grad = made.weight.grad.t().contiguous().t()
                optimizer.step()
                optimizer.zero_grad()
                yield

        return Run(Training(made, optimizer, lambda: None), HostObjects.of(), steps())

    try:
        expected, told = trained(make, parted(traced(make), 3), tmp_path / "store")
    finally:
        torch.set_flush_denormal(False)
    (line,) = told
    assert ("torch.set_flush_denormal is on" if how == "flush" else "its parameter's kind and memory order") in line
    assert any("replay" in record for record in records(tmp_path / "store").values())
    check_each(make, parted(traced(make), 3), tmp_path / "store", expected)


@pytest.mark.parametrize("parted", [in_parts, rolling])
def test_without_memory_for_a_copy_gradients_are_waited_for(
    parted: Parted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also those that are written again as soon as they are consumed, with no anchor in between."""

    def make() -> Run:
        run = small(nothing)()
        (net,), (optimizer,) = run.training.models, run.training.optimizers
        optimizer.param_groups[0]["foreach"] = False

        def zeroed(*_: object) -> None:
            for parameter in net.parameters():
                if parameter.grad is not None:
                    parameter.grad.data.zero_()

        optimizer.register_step_post_hook(zeroed)

        def steps() -> Iterator[None]:
            while True:
                x, y = batch()
                torch.autograd.backward(nn.functional.cross_entropy(net(x), y))
                count[0] += 1
                optimizer.step()
                yield

        run.steps = steps()
        return run

    count, refusals = [0], [0]
    snapshot = HostDevice.snapshot

    def refused(device: HostDevice, sources: Sequence[torch.Tensor]) -> list[Snapshot]:
        if count[0] <= 5:  # in which parts of every age are proven
            return snapshot(device, sources)
        refusals[0] += 1
        raise DeviceError("no memory")

    schedule = parted(traced(make), 3)
    assert schedule.gradients and all(row.until for row in schedule.gradients)
    copies_take(monkeypatch, lambda _: 0.01)
    monkeypatch.setattr(HostDevice, "snapshot", refused)
    count[0] = 0
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told and refusals[0]
    check_each(make, schedule, tmp_path / "store", expected)


def test_no_more_is_copied_on_the_device_than_planned(tmp_path: Path) -> None:
    """A gradient in whose place the next one is written leaves when it was planned to, and not with others later."""
    make = small(nothing, zeroed="after")
    run, schedule = begun(make), rolling(traced(make), 3, ease=8.0)
    assert schedule.gradients and not schedule.certificate.snapshot_bytes
    with attached(run, schedule, tmp_path / "store", lambda _: None) as ckpt:
        ckpt.restore()
        for _ in range(ITERATIONS):
            next(run.steps)
            ckpt.step()
        assert ckpt.stats().snapshot_bytes == 0


@BOTH
@pytest.mark.parametrize("when", ["before attach", "later"])
def test_where_cuda_graphs_are_replayed_no_gradient_is_relied_upon(
    parted: Parted, when: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They write the next ones in the same place, and nothing counts it."""
    make = small(nothing)
    schedule, passes = parted(traced(make), 3), iter(range(10**6))
    assert schedule.gradients
    if when == "before attach":
        monkeypatch.setattr(follower, "has_cuda_graphs", lambda: True)
    else:
        monkeypatch.setattr(HostDevice, "capturing", lambda _: next(passes) in (20, 21))
    expected, told = trained(make, schedule, tmp_path / "store")
    assert [line for line in told if "CUDA graphs may write gradients" in line] == told != []
    check_each(make, schedule, tmp_path / "store", expected)


def test_any_cuda_graph_of_the_process_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    class Captured:
        """In the place of a class that has no instances without CUDA."""

    class Derived(Captured):
        pass

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Captured)
    graph = Derived()
    assert not compiled.has_cuda_graphs(), "nothing is looked for where CUDA is not in use"
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert compiled.has_cuda_graphs()
    del graph
    assert not compiled.has_cuda_graphs()


@BOTH
def test_gradients_zeroed_in_place_that_were_not_when_traced(parted: Parted, tmp_path: Path) -> None:
    """Nothing tells before that write, and no checkpoint is wrong."""
    schedule = parted(traced(small(nothing)), 3)
    assert schedule.gradients and not any(row.until for row in schedule.gradients)
    make = small(nothing, zeroed="before")
    expected, _ = trained(make, schedule, tmp_path / "store")
    check_each(make, schedule, tmp_path / "store", expected)


def test_gradients_of_one_storage_are_held_apart(tmp_path: Path) -> None:
    """As FSDP2 makes them: what is held of some keeps no memory of the others, which training lets go of."""
    gone: list[bool] = []

    def make() -> Run:
        run = small(nothing)()
        (net,), (optimizer,) = run.training.models, run.training.optimizers

        def steps() -> Iterator[None]:
            parameters = list(net.parameters())
            storage = None
            while True:
                gone.append(storage is None or storage() is None)
                x, y = batch()
                gradients = torch.autograd.grad(nn.functional.cross_entropy(net(x), y), parameters)
                together = torch.cat([found.reshape(-1) for found in gradients])
                parts = torch.split(together, [found.numel() for found in parameters])
                for parameter, part in zip(parameters, parts, strict=True):
                    parameter.grad = part.view_as(parameter)
                optimizer.step()
                optimizer.zero_grad()
                storage = weakref.ref(together.untyped_storage())
                del together, parts, part
                yield

        run.steps = steps()
        return run

    schedule = rolling(traced(make), 3, ease=0.6)
    rows = {row.id for row in schedule.gradients}
    assert len(rows) == len(list(begun(make).training.models[0].parameters()))
    assert any(action.snapshot and action.tensor in rows for action in schedule.actions)
    gone.clear()
    expected, told = trained(make, schedule, tmp_path / "store")
    assert not told and all(gone)
    check_each(make, schedule, tmp_path / "store", expected)


@pytest.mark.parametrize("back", [1, 2, 3, 4])
@pytest.mark.parametrize("parted", [in_parts, rolling, lowdiff])
def test_what_is_trained_again_is_saved_as_it_is_now(parted: Parted, back: int, tmp_path: Path) -> None:
    """After a restore in mid-run iterations are trained a second time: their checkpoints are of that one."""
    make = small(nothing)
    check_trained_again(make, parted(traced(make), 3), back, tmp_path)


def check_trained_again(make: Make, schedule: Schedule, back: int, tmp_path: Path) -> None:
    """What a run saves that comes back to an earlier iteration, and trains on otherwise."""
    told = list[str]()
    run, expected = begun(make), {}
    with attached(run, schedule, tmp_path / "store", told.append) as ckpt:
        done = ckpt.restore()
        for last, seed in ((9, 0), (18, 1)):
            torch.manual_seed(seed)
            for iteration in range(done + 1, last + 1):
                next(run.steps)
                expected[iteration] = state_of(run)
                ckpt.step()
            if last == 9:
                ckpt.save()
                before = [each for each in records(tmp_path / "store") if each <= last - back]
                done = ckpt.restore(max(before))
                assert state_of(run) == expected[done]
    assert not told
    run = begun(make)
    with attached(run, schedule, tmp_path / "store", told.append) as ckpt:
        for iteration in records(tmp_path / "store"):
            assert ckpt.restore(iteration) == iteration
            assert state_of(run) == expected[iteration], f"iteration {iteration} differs"


@BOTH
def test_a_closure_is_refused(parted: Parted, tmp_path: Path) -> None:
    """Its gradients are made within the update."""

    def make() -> Run:
        run = small(nothing)()
        (net,), (optimizer,) = run.training.models, run.training.optimizers

        def steps() -> Iterator[None]:
            while True:
                x, y = batch()

                def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss = nn.functional.cross_entropy(net(x), y)
                    torch.autograd.backward(loss)
                    return loss

                optimizer.step(closure)  # type: ignore[arg-type]
                yield

        run.steps = steps()
        return run

    schedule = parted(traced(small(nothing)), 3)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == 1 and "closure" in told[0]
    check_each(make, schedule, tmp_path / "store", expected)


@BOTH
def test_the_first_checkpoint_is_proven(parted: Parted, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where an update made again gives other bits, it is told, and every checkpoint is read as a whole."""

    def wrong(optimizer: torch.optim.Optimizer) -> None:
        unhooked_step(optimizer)
        with torch.no_grad():
            optimizer.param_groups[-1]["params"][-1].view(-1)[0] += 1e-6

    monkeypatch.setattr("checkflow.state.restore.replay.unhooked_step", wrong)
    make = TRAININGS["adamw foreach"]
    schedule = parted(traced(make), 3)
    expected, told = trained(make, schedule, tmp_path / "store")
    assert len(told) == 1 and "is not the same, to the bit" in told[0]
    found = records(tmp_path / "store")
    assert found and not any("replay" in record for record in found.values())
    check_each(make, schedule, tmp_path / "store", expected)


@contextmanager
def hooked_by_user(optimizer: torch.optim.Optimizer, calls: list[str]) -> Iterator[None]:
    handles = [
        optimizer.register_step_pre_hook(lambda *_: calls.append("before")),
        optimizer.register_step_post_hook(lambda *_: calls.append("after")),
    ]
    yield
    for handle in handles:
        handle.remove()


def test_a_restore_calls_no_hook_and_leaves_no_gradient(tmp_path: Path) -> None:
    """What a user's hook or a scheduler does with an update was done when it was made."""
    make = TRAININGS["scheduler step"]
    schedule = in_parts(traced(make), 3)
    expected, _ = trained(make, schedule, tmp_path / "store")
    assert "replay" in records(tmp_path / "store")[6]
    run, calls = begun(make), list[str]()
    (optimizer,) = run.training.optimizers
    with hooked_by_user(optimizer, calls), attached(run, schedule, tmp_path / "store", lambda _: None) as ckpt:
        assert ckpt.restore(6) == 6
        assert not calls and all(p.grad is None for p in run.training.models[0].parameters())
        assert state_of(run) == expected[6]


def test_another_implementation_of_the_update_is_refused(tmp_path: Path) -> None:
    """It might give other bits: the line says which setting differs."""
    schedule = in_parts(traced(TRAININGS["adamw foreach"]), 3)
    trained(TRAININGS["adamw foreach"], schedule, tmp_path / "store")
    assert "replay" in records(tmp_path / "store")[6]
    run = begun(partial(simple, adamw(foreach=False)))
    with attached(run, schedule, tmp_path / "store", lambda _: None) as ckpt:
        with pytest.raises(InputError, match="foreach is False, and True in the checkpoint") as error:
            ckpt.restore(6)
        ckpt.restore(3)
    assert "\n" not in str(error.value)


def test_a_shorter_interval_is_refused(tmp_path: Path) -> None:
    """The iterations of one checkpoint do not fit in fewer; a longer one is taken."""
    schedule = in_parts(traced(TRAININGS["sgd"]), 3)
    run = begun(partial(simple, sgd))
    with pytest.raises(InputError, match="interval: 2 is less than the 3 iterations") as error:
        checkflow.attach(
            run.training.model, run.training.optimizer, store=tmp_path / "s", schedule=schedule, interval=2
        )
    assert "\n" not in str(error.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize(
    ("arguments", "line"), [({"interval": 2}, "interval: 2, but this schedule"), ({"slots": 1}, "slots: 1 has no room")]
)
def test_lanes_take_each_iteration_and_two_checkpoints_in_memory(
    arguments: dict[str, int], line: str, tmp_path: Path
) -> None:
    """Another interval, or a single slot, is refused in one line."""
    run = begun(partial(simple, sgd))
    schedule, models, optimizers = rolling(traced(TRAININGS["sgd"]), 3), run.training.model, run.training.optimizer
    with pytest.raises(InputError, match=line) as error:
        checkflow.attach(models, optimizers, store=tmp_path / "s", schedule=schedule, **arguments)  # type: ignore[arg-type]
    assert "\n" not in str(error.value) and not (tmp_path / "s").exists()


@pytest.mark.parametrize("lost", [4, 5])
def test_a_lane_that_is_lost_costs_no_later_checkpoint(lost: int, tmp_path: Path) -> None:
    """The one after it is read at once, and lanes go on from there."""
    make = TRAININGS["adamw foreach"]
    schedule, run = rolling(traced(make), 3), begun(make)
    expected = {}
    with attached(run, schedule, tmp_path / "store", lambda _: None) as ckpt:
        assert ckpt.restore() == 0
        for iteration in range(1, ITERATIONS + 1):
            next(run.steps)
            expected[iteration] = state_of(run)
            if iteration == lost:
                ckpt._executor.give_up()  # as where something was written unseen
            ckpt.step()
    found = records(tmp_path / "store")
    assert found[lost]["lanes"] == [0, 0, 0] and "replay" not in found[lost]
    ages = found[ITERATIONS]["lanes"]
    assert isinstance(ages, list) and sorted(ages) == [0, 1, 2]
    check_each(make, schedule, tmp_path / "store", expected)


def test_lanes_of_one_iteration_are_exported_as_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The first checkpoint is read at once: its files are those that it would have without lanes."""
    make = TRAININGS["adamw foreach"]
    schedule = rolling(traced(make), 3)
    trained(make, schedule, tmp_path / "store")
    plain, out = tmp_path / "plain.pt", tmp_path / "out.pt"
    whole = planned(traced(make), lambda problem: problem, "checkflow")
    run = begun(make)
    with attached(run, whole, tmp_path / "whole", lambda _: None) as ckpt:
        ckpt.restore()
        next(run.steps)
        ckpt.step()
    for store, path in ((tmp_path / "store", out), (tmp_path / "whole", plain)):
        assert run_command(["export", str(store), "--to", "torch", "--iteration", "1", "-o", str(path)]) == 0
        folder = path.with_suffix("")
        assert run_command(["export", str(store), "--to", "safetensors", "--iteration", "1", "-o", str(folder)]) == 0
    ours, theirs = torch.load(out, weights_only=True), torch.load(plain, weights_only=True)
    assert ours.keys() == theirs.keys()
    for file in ("model", "optimizer"):
        assert ours[file].keys() == theirs[file].keys()
        assert all(torch.equal(ours[file][name], tensor) for name, tensor in theirs[file].items())
        name = f"{file}.safetensors"
        assert (out.with_suffix("") / name).read_bytes() == (plain.with_suffix("") / name).read_bytes()
    code = run_command(["export", str(tmp_path / "store"), "--to", "torch", "-o", str(tmp_path / "newest.pt")])
    assert code == 0 and "updates were made again here\n" in capsys.readouterr().err
    assert torch.load(tmp_path / "newest.pt", weights_only=True).keys() == theirs.keys()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("module", "somebody.optimizers", "its updates are those of SGD, which is not torch's own; restore() it in"),
        ("laid", {"model/conv.weight": [1, 1]}, "commit.json: model/conv.weight has no order (1, 1); restore() it in"),
        ("type", "AdamW", "its updates cannot be made again on this host"),
    ],
)
def test_what_cannot_be_rebuilt_is_not_exported(key: str, value: object, message: str, tmp_path: Path) -> None:
    """An optimizer of the user's own, whose code is the training's; a record that was never right."""
    make = TRAININGS["sgd"]
    schedule = in_parts(traced(make), 3)
    trained(make, schedule, tmp_path / "store")
    loaded = load_newest(tmp_path / "store", 6).loaded
    assert loaded is not None
    record = json.loads(loaded.record)
    for optimizer in (
        *record["optimizers"],
        *(one for part in record["replay"]["parts"] for one in part["optimizers"]),
    ):
        optimizer[key] = value
    with pytest.raises((InputError, FormatError), match=re.escape(message)):
        whole(loaded.files, json.dumps(record).encode())


def test_updates_that_another_torch_made_may_have_other_bits(tmp_path: Path) -> None:
    make = TRAININGS["sgd"]
    trained(make, in_parts(traced(make), 3), tmp_path / "store")
    loaded = load_newest(tmp_path / "store", 6).loaded
    assert loaded is not None
    record = json.loads(loaded.record)
    record["versions"]["torch"] = "2.9.0"
    assert whole(loaded.files, json.dumps(record).encode()).differs.startswith("torch was 2.9.0 there")
    record["versions"]["cuda"] = "12.8"  # of which torch was built, and nothing more
    assert whole(loaded.files, json.dumps(record).encode()).differs.startswith("torch was 2.9.0 there")
    record["rng"]["cuda"] = ["AAAA"]
    assert whole(loaded.files, json.dumps(record).encode()).differs == "it may have trained on a CUDA device"


def test_what_export_cannot_bring_together_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an optimizer of somebody's own, as earlier versions saved such, and nothing is left behind."""
    make = TRAININGS["sgd"]
    with monkeypatch.context() as patch:
        patch.setattr(torch.optim.SGD, "__module__", "somebody.optimizers")
        patch.setattr("checkflow.runtime.parts.is_torchs_own", lambda _: True)
        trained(make, in_parts(traced(make), 3), tmp_path / "store")
    assert "replay" in records(tmp_path / "store")[6]
    out = tmp_path / "out.pt"
    code = run_command(["export", str(tmp_path / "store"), "--to", "torch", "--iteration", "6", "-o", str(out)])
    line = capsys.readouterr().err.strip().splitlines()[-1]  # after the progress
    assert (
        code == 2 and line.startswith(f"checkflow: {tmp_path / 'store'}: ") and "is not torch's own; restore()" in line
    )
    assert [path.name for path in tmp_path.iterdir()] == ["store"]
