"""What runs of an attached training: slots, the device that fills them, the executor of a schedule, and its hooks.

A training may change over to another schedule between two iterations. What was in flight is staged first; where the
state has other sizes than the slots, all that is staged is durable before they are given up for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

from checkflow.checkpointing.files import in_slot, saved_in, targets_in, with_others, without_bytes
from checkflow.checkpointing.fitting import Fitting
from checkflow.checkpointing.in_common import Since
from checkflow.checkpointing.replicated import UpdatesOnHost
from checkflow.checkpointing.sink import StoreSink
from checkflow.errors import CheckflowError, InputError
from checkflow.interrupts import held_back
from checkflow.lanes import lane_file
from checkflow.runtime.binding import Binding
from checkflow.runtime.bound import Bound
from checkflow.runtime.counters import Counters
from checkflow.runtime.cuda import CudaDevice
from checkflow.runtime.device import Device
from checkflow.runtime.executor import Executor
from checkflow.runtime.hook import Removable, register
from checkflow.runtime.host import HostDevice
from checkflow.runtime.in_flight import InFlight
from checkflow.runtime.lifecycle import Inside
from checkflow.runtime.matching import rooms_of
from checkflow.runtime.parts import Parts
from checkflow.runtime.pipeline import Pipeline, Record
from checkflow.runtime.replicated import Replicated
from checkflow.runtime.rolling import Rolling
from checkflow.runtime.settings import Settings
from checkflow.state.holders import optimizers_of
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import ReplayRecord
from checkflow.state.live import has_shared, live_state, parameter_names
from checkflow.state.restore import check_restorable
from checkflow.state.restore.files import TensorFile
from checkflow.state.restore.lanes import gathered
from checkflow.state.restore.replay import match_replay
from checkflow.store.trainer.handle import StoreHandle
from checkflow.training import Training
from checkflow.wrapped import updater


class OpenStore(Protocol):
    """Slots for a fitting, in the store that was asked for."""

    def __call__(self, fitting: Fitting, *, after: StoreHandle | None = None) -> StoreHandle: ...


class Engine:
    """See the module. `open_store` opens other slots, should the state get another size."""

    def __init__(
        self,
        training: Training,
        objects: HostObjects,
        fitting: Fitting,
        handle: StoreHandle,
        open_store: OpenStore,
        settings: Settings,
        store: Path,
        inside: Inside,
        notify: Callable[[str], None],
    ) -> None:
        self.inside = inside
        self.counters = Counters()
        self.events = handle.events  # of all handles and executors that follow each other
        self.handle = handle
        self.fitting = fitting
        self._training = training
        self._objects = objects
        self._open_store = open_store
        self._settings = settings
        self._store = store
        self._notify = notify
        self._on_host = UpdatesOnHost(
            training, lambda: self.handle, settings.approximate, lambda line: notify(f"{store}: {line}")
        )
        self._since = Since(training)
        self._restorable: object = None  # the structure of host state that was found to match the files
        self._bound: Binding | None = None  # what the host's state knows the tensors by
        self._hooks: list[Removable] = []
        self._device = self._device_of(handle)
        self.executor = self._executor_of(fitting)
        self._tell_peers()

    @property
    def interval(self) -> int:
        """Iterations from one checkpoint to the next."""
        return self.executor.interval

    def start(self) -> None:
        """Hooks work from now on."""
        self._hooks = register(self.executor, self._training)

    def check_room(self, fitting: Fitting) -> None:
        """Raises StoreError where host memory has no slots for a fitting in the place of these."""
        shared = self.handle.shared
        fitting.room(shared.slots // shared.lanes).check(given_back_bytes=shared.size_bytes)

    def change_over(self, fitting: Fitting) -> None:
        """Follow another schedule, which fits the training as it is now, from the iteration that just ended on.

        Raises StoreError where there is no memory for slots of another size; what was staged is durable then.
        """
        with self.inside, held_back(sigterm=False):
            self._take_hooks_off()
            before = self.executor
            before.retire()
            if not fitting.fits(self.handle.layouts):
                self._device.close()
                self.handle = self._open_store(fitting, after=self.handle)
                self._device = self._device_of(self.handle)
            self.fitting, self._restorable = fitting, None
            self.executor = self._executor_of(fitting)
            self.executor.succeed(before)
            self._tell_peers()
            self.start()

    def _tell_peers(self) -> None:
        """Before anything is staged by the schedule. Raises PeerError."""
        if self.handle.rulings is not None:
            self.handle.rulings.follows(self.executor.lag, self.executor.timetable.whole_every)

    def _whole_every(self) -> int:
        """The greatest of any rank's; 0 of one process."""
        return 0 if self.handle.rulings is None else self.handle.rulings.whole_every()

    def close(self) -> None:
        """Let the training go, and the slots; the store is still to be closed. Raises what no step() has raised."""
        self._take_hooks_off()
        try:
            self.executor.close()
        finally:
            self._device.close()

    def doubt(self) -> None:
        """Another training was refused the store: whether this one is trained from now on is looked at."""
        self.executor.without_update.doubt()

    def _take_hooks_off(self) -> None:
        while self._hooks:
            self._hooks.pop().remove()

    def _device_of(self, handle: StoreHandle) -> Device:
        device: Device
        if self.fitting.binding.device.type == "cuda":
            handle.take_memory()  # to be pinned
            device = CudaDevice(self.counters, self.fitting.binding.device)
        else:
            device = HostDevice(self.counters)
        try:
            device.register(handle.shared.address, handle.shared.size_bytes)
        except BaseException:
            device.close()
            raise
        return device

    def _executor_of(self, fitting: Fitting) -> Executor:
        return Executor(
            fitting.schedule,
            self._training,
            fitting.binding,
            self._device,
            StoreSink(self.handle, self.inside),
            self._capture,
            self.counters,
            self._settings,
            late=fitting.host.tensors,
            tell=self._notify,
            inside=self.inside,
            note=self.events.append,
            parting=lambda bound, pipeline: self._parts_of(fitting, bound, pipeline),
        )

    def _parts_of(self, fitting: Fitting, bound: Bound, pipeline: Pipeline) -> Parts:
        others = (
            fitting.schedule, self._training, bound, pipeline, fitting.host, self._prove, self._notify,
            self._whole_every,
        )  # fmt: skip
        if fitting.schedule.replica:
            return Replicated(*others, on_host=self._on_host)
        return Rolling(*others) if fitting.schedule.lanes > 1 else Parts(*others)

    def _prove(self, replay: str, filled: Mapping[int, InFlight], backs: Sequence[int]) -> str:
        """Makes a checkpoint's updates again beside the training that they are of."""
        names = parameter_names(self._training)
        binding = self.executor.bound.binding
        files = {
            (lane_file(lane, name) if backs else name): file
            for lane, checkpoint in filled.items()
            for name, file in in_slot(targets_in(binding, lane), checkpoint.slot.view).items()
        }
        files = gathered(backs, files) if backs else files
        try:
            record = ReplayRecord.model_validate_json(replay)
            again = match_replay(record, files, optimizers_of(self._training), names)
            if self.fitting.schedule.replica:
                return self._on_host.refusal(again, lambda parameter: saved_in(files, names[id(parameter)]))
            other = again.differs(lambda parameter: saved_in(files, names[id(parameter)]))
        except CheckflowError as error:
            return str(error)
        except Exception as error:  # noqa: BLE001 (of the optimizer's own code)
            return f"an update cannot be made again ({type(error).__name__}: {str(error).splitlines()[0]:.200})"
        return (
            "" if other is None else f"{names[id(other)]} is not the same, to the bit, when its updates are made again"
        )

    def _capture(self, iteration: int) -> Record:
        if self.executor.bound.binding is not self._bound:
            self._bound = self.executor.bound.binding
            self.fitting.host.found_anew()
        captured = self.fitting.host.capture(iteration)
        for line in self._since.ended():
            self._notify(f"{self._store}: {line}")
        if self.fitting.host.structure == self._restorable:
            return captured.record
        self._restorable = self.fitting.host.structure
        if has_shared(self._training):  # a forward pass may have gathered what ranks share by the time of the record
            record = self._checked(captured.record())
            return lambda: record
        before = self._members()
        return lambda: self._checked_later(captured.record(), before)

    def _members(self) -> object:
        """Changes where the training has other tensors, parameters or state than before."""
        return self.executor.bound.binding, [
            ([list(map(id, group["params"])) for group in optimizer.param_groups], len(optimizer.state))
            for optimizer in map(updater, self._training.optimizers)
        ]

    def _checked_later(self, record: bytes, before: object) -> bytes:
        """Once the next iteration has begun, which may have changed what it is compared with: then the next one is."""
        try:
            return self._checked(record)
        except InputError:
            if self._members() == before and not self.executor.bound.is_stale:
                raise
            self._restorable = None
            return record

    def _as_read(self) -> Mapping[str, TensorFile]:
        """The files of a checkpoint, those that other ranks save among them."""
        files, others = without_bytes(self.handle.layouts), self.fitting.host.elsewhere
        return with_others(
            files, rooms_of([live for live in live_state(self._training) if live.name in others]).values()
        )

    def _checked(self, record: bytes) -> bytes:
        """The first record of its kind. Raises InputError where no restore would take it."""
        try:
            check_restorable(self._as_read(), record, self._training, self._objects)
        except CheckflowError as error:
            raise InputError(f"{self._store}: no restore would take this training's checkpoints: {error}") from None
        return record
