"""What the executor decides: when, which, and what it says about it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import pytest
import small_trainings as trainings
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torn import Case, Factory, LateDevice, Rig, memory_of, random_schedule, rig

from checkflow.errors import AuditError, InputError
from checkflow.runtime import unmoved
from checkflow.runtime.binding import BoundStorage
from checkflow.runtime.counters import Cause, Counters
from checkflow.runtime.device import Batch, CopyEvent
from checkflow.runtime.host import HostEvent
from checkflow.runtime.matching import bind
from checkflow.state.names import StateName
from checkflow.training import Training


@settings(max_examples=40)
@given(
    factory=st.sampled_from(trainings.ALL),
    seed=st.integers(0, 10**6),
    lag=st.integers(0, 40),
    few_bytes=st.sampled_from([0, 10**9]),
    interval=st.integers(1, 3),
    slots=st.integers(2, 4),
    hold=st.integers(0, 1),
    wait=st.booleans(),
    snapshots=st.sampled_from([0.0, 0.5, 1.0]),
)
def test_any_schedule_on_any_device_tears_nothing(
    factory: Factory,
    seed: int,
    lag: int,
    few_bytes: int,
    interval: int,
    slots: int,
    hold: int,
    wait: bool,
    snapshots: float,
) -> None:
    """Whatever the actions' places, the link's delay, what leaves together, the interval and the backpressure."""
    schedule = random_schedule(factory, seed, interval=interval, snapshots=snapshots)
    made = rig(factory, schedule, lag=lag, few_bytes=few_bytes, slots=slots, hold=hold, wait=wait)
    made.run(7)
    made.close()
    assert made.torn() == []
    due = [iteration for iteration in range(1, 8) if iteration % interval == 0]
    assert made.sink.order == sorted(made.sink.order)
    assert set(made.sink.order) <= set(due)
    if wait:
        assert made.sink.order == due
    assert made.executor.pipeline.skipped + len(made.sink.order) == len(due)
    assert all(made.sink.records[iteration] == b"%d" % iteration for iteration in made.sink.order)


def test_without_a_free_slot_skip_goes_on_and_wait_waits() -> None:
    """Two slots that stay occupied: skip counts what it gave up, wait takes every iteration."""
    schedule = random_schedule(trainings.sgd, 0)
    skipping = rig(trainings.sgd, schedule, lag=0, slots=2, hold=2, wait=False)
    skipping.run(5)
    skipping.close()
    assert skipping.sink.order == [1, 2]
    assert skipping.executor.pipeline.skipped == 3
    waiting = rig(trainings.sgd, schedule, lag=0, slots=2, hold=2, wait=True)
    waiting.run(5)
    waiting.close()
    assert waiting.sink.order == [1, 2, 3, 4, 5]
    assert waiting.sink.waited == [3, 4, 5]
    assert waiting.counters.waits[Cause.SLOT] == 3


class Behind(LateDevice):
    """Milliseconds of a host that gives a device its iterations, which it computes for 20 ms and copies for so long."""

    def __init__(self, counters: Counters, *, ms_per_byte: float) -> None:
        super().__init__(counters, lag=10**9, few_bytes=0)
        self.host_ms = self.compute_ms = self._link_ms = 0.0  # when each has done what it was given; the host: now
        self._ms_per_byte = ms_per_byte
        self._ends_ms: dict[int, float] = {}  # by order

    def offload(self, batch: Batch) -> HostEvent:
        event = super().offload(batch)
        self._link_ms = max(self._link_ms, self.compute_ms)
        self._link_ms = self._ends_ms[event.order] = self._link_ms + batch.size_bytes * self._ms_per_byte
        return event

    def wait(self, event: CopyEvent, cause: Cause) -> None:
        super().wait(event, cause)
        self.compute_ms = max(self.compute_ms, self._ends_ms[event.order])

    def done(self, event: CopyEvent) -> bool:
        has_ended = self._ends_ms[event.order] <= self.host_ms
        if has_ended:
            self._run(event.order)
        return has_ended

    def done_meanwhile(self, event: CopyEvent) -> bool:
        self.host_ms = max(self.host_ms, min(self._ends_ms[event.order], self.compute_ms))
        return self.done(event)

    def synchronize(self, event: CopyEvent, _timeout_s: float | None = None, /) -> bool:
        self.host_ms = max(self.host_ms, self._ends_ms[event.order])
        return super().synchronize(event)


@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize(("host_ms", "copy_ms"), [(2, 5), (12, 5), (12, 10), (12, 16), (2, 30), (12, 30), (12, 60)])
def test_nothing_is_skipped_for_a_device_that_is_only_behind_its_host(
    host_ms: float, copy_ms: float, early: bool
) -> None:
    """What its host waits for costs no time. Where copies take longer than iterations, these wait for them as ever.

    What is copied too early is copied once more.
    """
    drawn = random_schedule(trainings.sgd, 0, snapshots=0.0)
    end = (0, len(drawn.anchors))
    places = [(0, 1) if early and number == 0 else end for number in range(len(drawn.actions))]
    actions = tuple(a.model_copy(update={"offload": place}) for a, place in zip(drawn.actions, places, strict=True))
    devices: list[Behind] = []

    def device(counters: Counters) -> Behind:
        devices.append(Behind(counters, ms_per_byte=copy_ms / sum(action.bytes for action in actions)))
        return devices[-1]

    def factory() -> Case:
        case = trainings.sgd()

        def iterate(number: int) -> None:
            devices[0].host_ms += host_ms
            devices[0].compute_ms = max(devices[0].compute_ms, devices[0].host_ms) + 20
            case.iterate(number)

        return Case(case.training, iterate)

    made = rig(factory, drawn.model_copy(update={"actions": actions}), device=device, wait=False)
    made.run(60)
    took_ms, skipped = devices[0].compute_ms / 60, made.executor.pipeline.skipped
    made.close()
    assert made.torn() == []
    assert skipped == 0
    assert early or took_ms < 1.1 * max(20, copy_ms)


def test_static_state_is_copied_once_for_each_slot_and_again_when_it_changed() -> None:
    """Frozen weights travel with the first checkpoint of each slot, and after someone wrote them."""
    schedule = random_schedule(trainings.frozen, 0)
    made = rig(trainings.frozen, schedule, lag=0, slots=2, hold=1)
    made.run(6)
    once = made.executor.pipeline.static_bytes
    assert once == 2 * schedule.static_state_bytes
    layer = made.case.training.models[0].get_submodule("0")
    with torch.no_grad():
        layer.get_parameter("weight").add_(1)
    made.run(4)
    made.close()
    assert made.torn() == []
    assert made.executor.pipeline.static_bytes == once + 2 * layer.get_parameter("weight").numel() * 4


def test_static_state_written_where_nothing_is_due_is_copied_again() -> None:
    """By an optimizer whose writes no version counter tells, in an iteration that no checkpoint is filled or due in."""

    def thawing() -> Case:
        net = trainings.mlp()
        case = trainings.plain(lambda ps: torch.optim.SGD(ps, lr=0.1, fused=True), net)

        def iterate(number: int) -> None:
            for parameter in net[0].parameters():
                parameter.requires_grad_(number == 7)
            case.iterate(number)

        return Case(case.training, iterate)

    made = rig(thawing, random_schedule(thawing, 0), lag=0, slots=2, interval=3)
    made.run(12)
    made.close()
    assert made.sink.order == [3, 6, 9, 12]
    assert made.torn() == []


def test_anchors_are_not_counted_where_nothing_is_due() -> None:
    """What is silent is what did not fire in the last iteration that a checkpoint was filled or due in."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0), lag=0, interval=4)
    for iterations in (4, 2, 1, 1, 3):
        made.run(iterations)
        assert made.executor.firings.silent == frozenset()
    made.close()
    assert made.sink.order == [4, 8] and made.torn() == []


@pytest.mark.parametrize(("slots", "hold"), [(2, 1), (1, 0)])
def test_static_state_written_while_it_is_read_discards_the_checkpoint(
    slots: int, hold: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No guard sees the write, so the checkpoint cannot be vouched for; the next one, in its slot, is whole again."""
    monkeypatch.setattr(unmoved, "is_lent", lambda _: False)  # to NumPy, as all is that these tests look at
    schedule = random_schedule(trainings.frozen, 0)
    made = rig(trainings.frozen, schedule, slots=slots, hold=hold)
    made.run(1)
    with torch.no_grad():
        made.case.training.models[0].get_submodule("0").get_parameter("weight").add_(1)
    made.run(3)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [2, 3, 4]
    assert made.executor.pipeline.discarded == 1


def test_state_that_no_hook_guards_is_named_and_waited_for() -> None:
    """A moving average belongs to no optimizer."""
    made = rig(trainings.averaging, random_schedule(trainings.averaging, 1))
    made.run(3)
    names = {storage.name for storage in made.executor.bound.unwatched}
    assert names
    assert all(name.startswith("model.1/") for name in names)
    assert made.counters.waits[Cause.UNWATCHED] >= 2
    made.close()


def test_a_watched_training_waits_at_no_iterations_end() -> None:
    """Once every guard has fired, nothing is waited for before it is written."""
    made = rig(trainings.adamw_foreach, random_schedule(trainings.adamw_foreach, 1))
    made.run(4)
    assert made.executor.bound.unwatched == ()
    assert made.counters.waits[Cause.UNWATCHED] == 0
    made.close()


def test_anchors_that_did_not_fire_are_known() -> None:
    """A schedule for two micro-batches, run with one."""
    made = rig(trainings.accumulating, random_schedule(trainings.accumulating, 0))
    made.case.iterate(0)
    made.mark()
    silent = [made.executor.timetable for _ in made.executor.firings.silent]
    assert silent
    made.close()
    assert made.torn() == []


def test_a_forward_that_bypasses_hooks_tears_nothing() -> None:
    """model.forward(x) calls no hook of the model, and bn.forward none of the layer."""

    class Bypassing(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)
            self.head = nn.Linear(6, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.head(self.norm.forward(x))
            return out

    def factory() -> Case:
        torch.manual_seed(0)
        return trainings.plain(lambda ps: torch.optim.SGD(ps, lr=0.1), Bypassing())

    made = rig(factory, random_schedule(factory, 0, snapshots=0.0))
    made.run(5)
    assert {storage.name for storage in made.executor.bound.unwatched} == {
        "model/norm.running_mean",
        "model/norm.running_var",
        "model/norm.num_batches_tracked",
    }
    made.close()
    assert made.torn() == []


def test_tensors_that_move_are_found_again() -> None:
    """New addresses through .data and load_state_dict, in the middle of what is in flight."""
    made = rig(trainings.adamw_looped, random_schedule(trainings.adamw_looped, 2))
    model, optimizer = made.case.training.models[0], made.case.training.optimizers[0]
    made.run(2)
    for parameter in model.parameters():
        parameter.data = parameter.data.clone()
    made.run(2)
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    made.run(2)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5, 6]


def test_save_completes_the_last_iteration_at_once() -> None:
    """Also one that the interval left out; but not once the next iteration has begun."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, interval=3), interval=3)
    made.run(4)
    assert made.sink.order == []
    assert made.executor.save()
    assert made.sink.order == [3, 4]
    made.run(1)
    made.case.training.models[0](torch.zeros(4, 6))
    with pytest.raises(InputError, match="right after step"):
        made.executor.save()
    made.close()
    assert made.torn() == []


@pytest.mark.parametrize("interval", [2, 9])
@pytest.mark.parametrize("path", ["", "0", "1"])
def test_a_save_is_refused_once_an_iteration_began_that_nothing_is_done_in(path: str, interval: int) -> None:
    """Its hooks return at once, but tell that. By the model, an anchor in it, or a part of it that has buffers."""
    schedule = random_schedule(trainings.sgd, 0, interval=interval, snapshots=0.0)
    made = rig(trainings.sgd, schedule, lag=0, few_bytes=10**9, interval=interval)
    made.run(1)
    assert not made.executor.listens
    assert made.executor.awake == (interval == 2)  # the next iteration is due
    module = made.case.training.models[0].get_submodule(path)
    module(torch.zeros(4, 8 if path == "1" else 6))
    with pytest.raises(InputError, match="right after step"):
        made.executor.save()
    made.close()


def test_what_is_written_while_the_hosts_state_is_read_is_guarded(monkeypatch: pytest.MonkeyPatch) -> None:
    """A user's state_dict() may run a module; copies made before the iteration's end are not in flight then."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0))
    module = made.case.training.models[0].get_submodule("1")
    protect = made.executor.pipeline.protect
    causes: list[Cause] = []

    def protected(storages: Iterable[BoundStorage], cause: Cause) -> None:
        causes.append(cause)
        protect(storages, cause)

    def capture(_iteration: int) -> Callable[[], bytes]:
        monkeypatch.setattr(made.executor.pipeline, "protect", protected)
        module(torch.zeros(4, 8))
        monkeypatch.undo()
        return bytes

    made.executor.pipeline._capture = capture
    made.run(1)
    assert causes == [Cause.FORWARD]


@pytest.mark.parametrize("interval", [1, 2, 5])
@pytest.mark.parametrize("lag", [0, 10**9])
def test_where_all_leaves_at_the_end_anchors_listen_while_a_copy_is_on_its_way(
    monkeypatch: pytest.MonkeyPatch, interval: int, lag: int
) -> None:
    """Nothing is planned within an iteration then: a checkpoint is staged at one of its anchors, and only for that."""
    schedule = random_schedule(trainings.sgd, 1, interval=interval, snapshots=0.0)
    made = rig(trainings.sgd, schedule, lag=lag, few_bytes=10**9, interval=interval)
    fire = made.executor.firings.fire
    heard: set[int] = set()  # iterations completed when an anchor was

    def heard_fire(kind: str, subject: str) -> int | None:
        heard.add(made.executor.completed)
        return fire(kind, subject)

    monkeypatch.setattr(made.executor.firings, "fire", heard_fire)
    made.run(9)
    due = list(range(interval, 10, interval))
    assert heard == ({iteration for iteration in due if iteration < 9} if lag else set())
    assert made.sink.order == [iteration for iteration in due if iteration < 9 or not lag]
    made.close()
    assert made.sink.order == due
    assert made.torn() == []


@pytest.mark.parametrize("seed", range(4))
def test_an_iteration_that_hooks_slept_through_is_saved_whole(seed: int) -> None:
    """As where step() was interrupted before it could tell that the next iteration is due."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, seed, interval=3), interval=3)
    made.run(2)
    assert made.executor.awake
    made.executor.awake = False
    made.run(2)
    made.close()
    assert made.sink.order == [3]
    assert made.torn() == []


def test_the_last_iteration_is_complete_after_close_and_hooks_are_gone() -> None:
    """Close drains; training on afterwards touches nothing."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0))
    made.run(3)
    made.close()
    assert made.sink.order == [1, 2, 3]
    made.case.iterate(3)
    assert made.torn() == []
    model, optimizer = made.case.training.models[0], made.case.training.optimizers[0]
    assert not any(m._forward_pre_hooks or m._forward_hooks for m in model.modules())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_failed_capture_raises_and_costs_no_slot() -> None:
    """The host's state cannot be read once: the error is the loop's, and the next checkpoint has a slot."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0), slots=2)
    capture, failing = made.executor.pipeline._capture, [True]

    def flaky(iteration: int) -> Callable[[], bytes]:
        if failing.pop() if failing else False:
            raise RuntimeError("no state")
        return capture(iteration)

    made.executor.pipeline._capture = flaky
    with pytest.raises(RuntimeError, match="no state"):
        made.run(1)
    made.run(3)
    assert made.sink.order
    made.executor.close()
    assert made.torn() == []


def _hidden_update(made: Rig) -> None:
    """What a replayed CUDA graph does: it writes state, and no hook fires."""
    with torch.no_grad():
        for parameter in made.case.training.models[0].parameters():
            parameter.detach().sub_(0.01)
    made.mark()


def test_replays_of_a_captured_cuda_graph_tear_nothing() -> None:
    """Hooks fire while it is recorded and never again; what was not read before recording is given up."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, snapshots=0.0))
    made.run(3)
    device = made.executor._device
    assert isinstance(device, LateDevice)
    device.captures = True
    made.case.training.models[0](torch.zeros(4, 6))
    device.captures = False
    discarded = made.executor.pipeline.discarded
    assert discarded == 1
    for _ in range(4):
        _hidden_update(made)
    made.close()
    assert made.torn() == []
    assert made.sink.order[-4:] == [4, 5, 6, 7]


def test_compiled_updates_tear_nothing() -> None:
    """Once something was compiled, a guard that did not fire in the last iteration is not relied upon."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0, snapshots=0.0))
    made.run(3)
    made.executor.compiling()
    for _ in range(4):
        _hidden_update(made)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5, 6, 7]


def test_users_hooks_that_write_run_after_the_guards() -> None:
    """Weight decay in an optimizer's pre-hook, and the spectral norm's power iteration in a forward pre-hook."""

    def factory() -> Case:
        torch.manual_seed(0)
        model = nn.Sequential(torch.nn.utils.spectral_norm(nn.Linear(6, 8)), nn.Linear(8, 3))
        case = trainings.plain(lambda ps: torch.optim.SGD(ps, lr=0.1), model)

        def decay(*_: object) -> None:
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(0.9)

        case.training.optimizers[0].register_step_pre_hook(decay)
        return case

    for seed in range(4):
        made = rig(factory, random_schedule(factory, seed, snapshots=0.0))
        made.run(5)
        made.close()
        assert made.torn() == []


def test_audit_names_a_write_that_no_guard_saw() -> None:
    """Weights are clamped after step(), where an offload may be reading them."""
    made = rig(trainings.sgd, random_schedule(trainings.sgd, 0), audit=True)
    made.run(2)
    made.case.training.models[0].get_submodule("0").get_parameter("weight").data.clamp_(-0.01, 0.01)
    with pytest.raises(AuditError, match=r"model/0\.weight was written outside"):
        made.run(1)
    made.close()
    assert made.torn() == []
    assert made.executor.pipeline.discarded >= 1


@pytest.mark.parametrize("factory", trainings.ALL, ids=lambda factory: factory.__name__)
def test_audit_is_content_with_guarded_writes(factory: Factory) -> None:
    """No training of ours writes elsewhere."""
    made = rig(factory, random_schedule(factory, 0), lag=2, audit=True)
    made.run(5)
    made.close()
    assert made.torn() == []


def test_clamping_before_step_is_saved() -> None:
    """A write after the update and before the mark belongs to the iteration, though its tensor was copied early."""
    schedule = random_schedule(trainings.in_backward, 3, snapshots=0.0)
    made = rig(trainings.in_backward, schedule, lag=0)
    for number in range(5):
        made.case.iterate(number)
        with torch.no_grad():
            for parameter in made.case.training.models[0].parameters():
                parameter.clamp_(-0.02, 0.02)
        made.mark()
    made.close()
    assert made.torn() == []


def _sgd_for_adamw() -> Case:
    return trainings.plain(lambda ps: torch.optim.SGD(ps, lr=0.1))


def _adam_for_adamw() -> Case:
    return trainings.plain(lambda ps: torch.optim.RMSprop(ps, lr=0.1))


def test_another_optimizer_is_refused_at_its_first_update() -> None:
    """Its state does not exist before; then the first difference is named."""
    schedule = random_schedule(trainings.adamw_looped, 0)
    with pytest.raises(InputError, match=r"optimizer/0\.bias\.exp_avg: in the schedule"):
        rig(_sgd_for_adamw, schedule).run(1)
    with pytest.raises(
        InputError,
        match=r"optimizer/0\.\w+\.exp_avg: in the schedule, but this optimizer has no such",
    ):
        rig(_adam_for_adamw, schedule).run(1)


def _changed(change: Callable[[nn.Sequential], object]) -> Factory:
    def factory() -> Case:
        model = trainings.mlp()
        change(model)
        return trainings.plain(lambda ps: torch.optim.SGD(ps, lr=0.1), model)

    return factory


MISMATCHES: list[tuple[Callable[[nn.Sequential], object], str]] = [
    (lambda m: m.append(nn.Linear(3, 3)), r"model/5\.weight: is state of this training, but not in the schedule"),
    (lambda m: m.pop(4), r"model/4\.weight: in the schedule, but not in this training"),
    (lambda m: setattr(m, "0", nn.Linear(6, 9)), r"model/0\.weight: has shape \(9, 6\), \(8, 6\) in the schedule"),
    (lambda m: m[1].double(), r"model/1\.weight: has dtype float64, float32 in the schedule"),
    (lambda m: m[0].to("meta"), r"model/0\.weight: has no data yet"),
    (
        lambda m: m[0].register_buffer("odd", torch.zeros(8, 8)[:, ::2]),
        r"model/0\.odd: .* overlaps or has holes; make it contiguous",
    ),
    (
        lambda m: m[0].register_buffer("spread", torch.zeros(1).expand(4)),
        r"model/0\.spread: .* overlaps or has holes",
    ),
    (lambda m: m[0].register_buffer("sparse", torch.zeros(4).to_sparse()), r"model/0\.sparse: layout .*sparse"),
]


@pytest.mark.parametrize(("change", "message"), MISMATCHES, ids=[message[:22] for _, message in MISMATCHES])
def test_the_first_difference_is_named(change: Callable[[nn.Sequential], object], message: str) -> None:
    """A training that is not the schedule's is refused in one line."""
    with pytest.raises(InputError, match=message) as caught:
        rig(_changed(change), random_schedule(trainings.sgd, 0))
    assert "\n" not in str(caught.value)


def test_a_new_buffer_without_elements_needs_no_room() -> None:
    """One that appears after attach."""
    training = trainings.sgd().training
    schedule = random_schedule(trainings.sgd, 0)
    binding = bind(schedule, training)
    training.models[0].register_buffer("empty", torch.empty(0))
    assert bind(schedule, training, binding).targets == binding.targets


def test_what_is_refused_later_on_leaves_what_was_bound_as_it_was() -> None:
    """The first row's tensor moved, the last one's has another shape now."""
    training = trainings.sgd().training
    binding = bind(random_schedule(trainings.sgd, 0), training)
    lives = {storage: storage.lives for storage in binding.storages.values()}
    layers = training.models[0]
    assert isinstance(layers, nn.Sequential)
    layers[0].weight = nn.Parameter(layers.get_parameter("0.weight").detach())
    layers[4].bias = nn.Parameter(torch.zeros(5))
    training.optimizers[0].param_groups[0]["params"] = list(layers.parameters())
    with pytest.raises(InputError, match=r"model/4\.bias: has shape \(5,\), and had \(3,\); .* attach anew"):
        bind(random_schedule(trainings.sgd, 0), training, binding)
    assert lives == {storage: storage.lives for storage in binding.storages.values()}


@pytest.mark.parametrize("wrapped", [False, True])
@pytest.mark.parametrize("early", [False, True])
def test_compiled_models_tear_nothing(wrapped: bool, early: bool) -> None:
    """Compiled before or after attach, attached as the wrapper or as what is inside; hooks inside do not fire."""
    torch._dynamo.reset()

    def build() -> tuple[nn.Module, Case]:
        model = trainings.mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        training = Training(compiled if wrapped else model, optimizer, lambda: None)  # type: ignore[arg-type]

        def iterate(number: int) -> None:
            torch.manual_seed(number)
            run = compiled if early or number > 2 else model
            torch.autograd.backward(run(torch.randn(4, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return model, Case(training, iterate)

    def factory() -> Case:
        return build()[1]

    schedule = random_schedule(factory if not wrapped else lambda: _unwrapped(build), 0, snapshots=0.0)
    made = rig(factory, schedule)
    made.run(6)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5, 6]
    torch._dynamo.reset()


@pytest.mark.parametrize("warm", [False, True])
def test_a_model_that_runs_compiled_now_and_then_tears_nothing(warm: bool) -> None:
    """One that began before attach takes nothing from those after it; code that is compiled already tells nothing."""
    torch._dynamo.reset()
    other = torch.compile(nn.Linear(2, 2), backend="aot_eager")
    other(torch.ones(1, 2))

    def factory() -> Case:
        model = trainings.mlp()
        compiled = torch.compile(model, backend="aot_eager")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        if warm:
            torch.autograd.backward(compiled(torch.randn(4, 6)).sum())
            optimizer.zero_grad()

        def iterate(number: int) -> None:
            torch.manual_seed(number)
            run = compiled if number > 2 and number != 5 else model
            torch.autograd.backward(run(torch.randn(4, 6)).square().mean())
            optimizer.step()
            optimizer.zero_grad()

        return Case(Training(model, optimizer, lambda: None), iterate)

    made = rig(factory, random_schedule(factory, 0, snapshots=0.0))
    made.run(8)
    made.close()
    torch._dynamo.reset()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5, 6, 7, 8]


def _unwrapped(build: Callable[[], tuple[nn.Module, Case]]) -> Case:
    model, case = build()
    return Case(Training(model, case.training.optimizers[0], lambda: None), case.iterate)


def test_tied_names_are_one_tensor() -> None:
    """The second name is an alias; its bytes travel once."""
    made = rig(trainings.tied, random_schedule(trainings.tied, 0))
    targets = made.sink.binding.targets
    assert targets[StateName("model/head.weight")].alias_of == "model/embed.weight"
    made.run(3)
    made.close()
    last: Rig = made
    weight = last.case.training.models[0].get_parameter("embed.weight")
    assert last.sink.staged[3]["model/embed.weight"] == memory_of(weight)


def test_waiting_completes_what_is_in_flight_before_it_waits() -> None:
    """Two slots, one of them the newest staged: the other one's checkpoint is still on its way when the next is due."""
    schedule = random_schedule(trainings.sgd, 0, interval=2, snapshots=1.0)
    made = rig(trainings.sgd, schedule, slots=2, hold=1, interval=1)
    made.run(6)
    made.close()
    assert made.torn() == []
    assert made.sink.order == [1, 2, 3, 4, 5, 6]
    assert made.counters.waits[Cause.SLOT] >= 3 and made.counters.waits[Cause.DRAIN] == 1
