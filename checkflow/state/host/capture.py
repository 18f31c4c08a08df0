"""All of the host's state at the iteration's end, as one record.

    state = HostState(training, objects, stored=names.__contains__, fingerprints={"schedule": digest})
    check_capturable(state)                   # at attach: names what cannot be saved
    captured = state.capture(iteration)       # at ckpt.step(), in the training's thread
    handle.stage(slot, iteration, captured.record())     # once the checkpoint's copies have ended

Call `capture` in the loop, before the next batch is asked for: a loader's position is then that of the last batch that
the loop consumed. A loader wrapped in a prefetcher that asks ahead is itself ahead; attach a wrapper that knows which
batch was consumed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from types import MappingProxyType

import numpy as np
import torch
import xxhash

from checkflow import about
from checkflow.state.divided import elsewhere, modules_alike, modules_divided, require_alike, vouched
from checkflow.state.holders import extra_state_of, modules_of, optimizers_of
from checkflow.state.host.computed_by import computed_by
from checkflow.state.host.encode import encode
from checkflow.state.host.gradients import GradientReader
from checkflow.state.host.json_values import Json, dump
from checkflow.state.host.modes import ModeReader
from checkflow.state.host.objects import HostObjects, Vouches, read_without_waiting, state_of
from checkflow.state.host.optimizers import IsStored, OptimizerReader
from checkflow.state.host.passes import own_type
from checkflow.state.host.record import FORMAT, VERSION
from checkflow.state.host.rng import RngReader
from checkflow.state.host.tensors import Room, split
from checkflow.state.live import in_models, listed_state, parameters_of, walk
from checkflow.state.names import StateName, file_of, is_of_kind, subject_of
from checkflow.state.shards import lowest_of, place_of, tie_of
from checkflow.training import Training
from checkflow.wrapped import updater

_ROOM_BYTES = 2**16
_LOOKS_EACH = 64  # iterations, on average
_ROOM_BYTES_A_PARAMETER = 256  # its name, and its optimizer state where it has none yet


@dataclass(frozen=True, slots=True)
class Captured:
    """The host's state at one moment. `parts` that are functions wait for copies from the device."""

    parts: tuple[str | Callable[[], str], ...]

    def record(self) -> bytes:
        """The record's bytes, JSON in ASCII."""
        return "".join(part if isinstance(part, str) else part() for part in self.parts).encode("ascii")


class HostState:
    """What `capture` reads. Texts that never change are made once.

    Args:
        training: the live models and optimizers.
        objects: what else the user attached.
        stored: whether a file of the checkpoint holds the tensor of a state name, "optimizer/fc.weight.exp_avg". What
            no file holds goes into the record if it is small, and is refused otherwise.
        rooms: of tensors in the objects' state, by state name: what the files have room for.
        tied_in_files: names that files have only as another name of a tensor.
        fingerprints: of the schedule and the state, by what they are of.

    Models and optimizers have the files "model.safetensors", "optimizer.safetensors" ("model.0.safetensors", ... where
    there are several), with the state's names less "model/" or "optimizer/".
    """

    def __init__(
        self,
        training: Training,
        objects: HostObjects,
        *,
        stored: IsStored,
        fingerprints: Mapping[str, str],
        rooms: Mapping[StateName, Room] = MappingProxyType({}),
        tied_in_files: Mapping[StateName, StateName] = MappingProxyType({}),
    ) -> None:
        self._models = modules_of(training)
        self._files = (*self._models, *training.listed.tensors)
        self._training = training
        self._names_by_id: dict[int, StateName] = {}
        self._several: tuple[tuple[int, ...] | None, str] = (None, "")  # how many parameters have state, and the text
        self._tied_in_files = tied_in_files
        self._tied: dict[str, dict[str, str]] = {}  # beside those, of each model
        self._optimizers: list[OptimizerReader] = []
        self.found_anew()
        self._elsewhere: dict[StateName, int] = {}
        self._names = 0
        self._optimizers = [
            OptimizerReader(holder, optimizer, self._names_by_id, lambda name: stored(name) or name in self._elsewhere)
            for holder, optimizer in optimizers_of(training).items()
        ]
        self._objects = objects
        self._rooms = rooms
        self._about: tuple[object, str] = (None, "")  # what is known of the run, and its text
        self._alike = modules_alike(training)
        self._divided = modules_divided(training)
        self._frozen: tuple[tuple[str, ...] | None, str] = (None, "")  # likewise, of what requires no gradient
        self._gradients: tuple[tuple[str, ...] | None, str] = (None, "")  # likewise, of what has a gradient
        self._gradient_reader = GradientReader()
        self._modes: tuple[dict[str, bool] | None, str] = (None, "")  # likewise, of what is in training mode
        self._mode_reader = ModeReader(training)
        self._epoch: int | None = None
        self._tensors: dict[StateName, torch.Tensor] = {}
        self._rng = RngReader()
        head = {
            "format": FORMAT, "version": VERSION, "fingerprints": dict(fingerprints), "versions": versions(),
            "computed_by": computed_by(training),
        }  # fmt: skip
        self._head = dump(head)[:-1]  # type: ignore[arg-type]

    def found_anew(self) -> None:
        """A tensor of the training moved, or it, or a module, is another one: what each parameter is called, what is
        tied, what ranks share and divide, and which modules have more to save."""
        self._several = (None, "")
        self._extra = {holder: extra_state_of(model) for holder, model in self._models.items()}
        self._named = tuple(parameters_of(self._training))  # which keeps them, so that an id stays its parameter's
        names = {id(parameter): name for name, parameter in self._named}
        if names != self._names_by_id:
            self._names_by_id.clear()
            self._names_by_id.update(names)
            for reader in self._optimizers:
                reader.forget()
        first: dict[tuple[object, ...], StateName] = {}
        self._tied = {}
        for live in chain(in_models(self._training), listed_state(self._training.listed)):
            name = first.setdefault((live.name.holder, *tie_of(live.held)), live.name)
            if name not in (live.name, self._tied_in_files.get(live.name)):
                self._tied.setdefault(name.holder, {})[live.name.path] = name.path

    def capture(self, iteration: int) -> Captured:
        """The state after `iteration` completed iterations. Raises InputError that names what cannot be saved."""
        require_alike(self._divided)
        several = self._several_text()
        if self._objects.member is not None:
            self._objects.member.vouch(iteration, self._vouches(iteration))
        optimizers = ",".join(reader.read() for reader in self._optimizers)
        before = f'{self._head},"iteration":{iteration},"models":[{self._model_texts()}],"optimizers":[{optimizers}]'
        self._tensors = {}
        objects = tuple(self._object_parts())
        rng = self._rng.read(self._objects.generators)  # after the objects: a fresh loader may draw when it is asked
        metadata = dump(encode(dict(self._objects.metadata), "metadata"))
        noted = f"{self._losses_text()}{self._frozen_text()}{self._gradients_text()}{self._modes_text()}"
        more = f"{self._about_text()}{self._member_text()}{several}{noted}"
        end = f'],"rng":{rng},"metadata":{metadata}{more}}}'
        return Captured((f'{before},"objects":[', *objects, end))

    def part(self) -> str:
        """PartRecord's fields of what is now, for `Updates`. Raises InputError."""
        self._several_text()  # what another rank saves is none of the host's
        return f'"optimizers":[{",".join(reader.read() for reader in self._optimizers)}]'

    def update(self, number: int, gradients: Sequence[str], factor_rows: Mapping[str, int]) -> str:
        """UpdateRecord's, of the update that optimizer `number` is about to make. Raises InputError."""
        reader = self._optimizers[number]
        threads = torch.get_num_threads()
        fields: dict[str, Json] = {"optimizer": reader.name, "gradients": list(gradients), "threads": threads}
        if factor_rows:
            fields["factor_rows"] = dict(factor_rows)
        head = dump(fields)
        return f'{head[1:-1]},"groups":[{reader.groups()}]'

    def _about_text(self) -> str:
        run = self._objects.run
        if run is None:
            return ""
        known = (run.git, self._epoch)
        if known != self._about[0]:
            self._about = (known, f',"about":{dump(run.about(self._epoch).model_dump(mode="json"))}')
        return self._about[1]

    def _member_text(self) -> str:
        member = self._objects.member
        if member is None:
            return ""
        fields: dict[str, Json] = {"rank": member.rank, "size": member.size, "attempt": member.attempt}
        if self._alike:
            fields["shares_buffers"] = [model.require_forward_param_sync for model in self._alike]
        return f',"member":{dump(fields)}'

    @property
    def elsewhere(self) -> Mapping[StateName, int]:
        """State that another rank's files hold, and which rank's, as of the last `capture`."""
        return self._elsewhere

    def _several_text(self) -> str:
        """What ranks share and what they divide: found anew where optimizers have other state than before."""
        known = tuple(len(updater(optimizer).state) for optimizer in self._training.optimizers)
        if known != self._several[0]:
            lives = list(walk(self._training))
            self._elsewhere = elsewhere(self._training, lives)
            self._names = vouched(self._training, lives, content=False)
            shared = ((live, place) for live in lives if (place := place_of(live.held)) is not None)
            found = {
                live.name: {
                    "shape": list(place.shape),
                    "offsets": list(place.offsets),
                    "sizes": list(place.sizes),
                    "lowest": lowest_of(live.held),
                }
                for live, place in shared
            }
            shards = f',"shards":{dump(found)}' if found else ""  # type: ignore[arg-type]
            others = f',"elsewhere":{dump(dict(self._elsewhere))}' if self._elsewhere else ""  # type: ignore[arg-type]
            self._several = (known, f"{shards}{others}")
        return self._several[1]

    def _vouches(self, iteration: int) -> Vouches:
        """Content is looked at in the first iterations, and then now and then, at no even distance: a training that
        makes ranks alike again each so many iterations would be found so each time."""
        looks = iteration < _LOOKS_EACH or xxhash.xxh3_64_intdigest(iteration.to_bytes(8)) % _LOOKS_EACH == 0
        content = vouched(self._training, walk(self._training), content=True) if self._names and looks else 0
        return self._names, content

    def _losses_text(self) -> str:
        known = self._objects.losses.known
        return f',"losses":{dump(list(known))}' if known else ""

    def _frozen_text(self) -> str:
        known = tuple(str(name) for name, parameter in self._named if not parameter.requires_grad)
        if known != self._frozen[0]:
            self._frozen = (known, f',"frozen":{dump(list(known))}')
        return self._frozen[1]

    def _gradients_text(self) -> str:
        known = self._gradient_reader.read(self._named)
        if known is not self._gradients[0]:
            self._gradients = (known, f',"gradients":{dump(list(known))}')
        return self._gradients[1]

    def _modes_text(self) -> str:
        known = self._mode_reader.read()
        if known is not self._modes[0]:
            self._modes = (known, f',"modes":{dump(dict(known))}')
        return self._modes[1]

    @property
    def structure(self) -> tuple[tuple[str, ...], ...]:
        """Changes when optimizers have other state than before, or models other ties."""
        return (*(reader.structure for reader in self._optimizers), (dump(self._tied),))  # type: ignore[arg-type]

    def _model_texts(self) -> str:
        extra: dict[str, dict[str, object]] = {}
        for holder, modules in self._extra.items():
            for path, module in modules.items():
                where = f"{subject_of(holder, path)}._extra_state"
                extra.setdefault(holder, {})[path] = encode(module.get_extra_state(), where)
        fields: dict[str, dict[str, Json]] = {
            prefix: {"name": prefix, "file": file_of(prefix), "extra": extra.get(prefix, {})}  # type: ignore[dict-item]
            for prefix in self._files
        }
        for prefix, tied in self._tied.items():
            fields[prefix]["tied"] = dict(tied)
        return ",".join(map(dump, fields.values()))

    def _object_parts(self) -> Iterator[str | Callable[[], str]]:
        between = ""
        self._epoch = None
        for name, member in self._objects.objects.items():
            head: dict[str, Json] = {"name": name, "type": own_type(member)}
            later = read_without_waiting(member)
            if later is None:
                found = split(name, state_of(member), self._rooms)
                if self._epoch is None and is_of_kind(name, "loader"):
                    self._epoch = epoch_of(found.state)
                self._tensors |= found.tensors
                head |= {"file": file_of(name)} if found.tensors else {}
                head |= {"on_device": list(found.on_device)} if found.on_device else {}
                head |= {"leaves": list(found.leaves)} if found.leaves else {}
                yield f'{between}{dump(head)[:-1]},"state":{dump(encode(found.state, name))}}}'
            else:
                yield f'{between}{dump(head)[:-1]},"state":'
                yield lambda state=later, name=name: dump(encode(state(), name))  # type: ignore[misc]
                yield "}"
            between = ","

    def tensors(self) -> Mapping[StateName, torch.Tensor]:
        """Of the last `capture`: the objects' tensors that go to files, by state name. They may change from now on."""
        found, self._tensors = self._tensors, {}
        return found

    def room_bytes(self) -> int:
        """Bytes that a record of this training may need, now and once the optimizers have their state."""
        return 2 * len(self.capture(0).record()) + len(self._named) * _ROOM_BYTES_A_PARAMETER + _ROOM_BYTES


def check_capturable(state: HostState) -> None:
    """Raises InputError that names what cannot be saved. To be called at attach: it reads everything once."""
    state.capture(0).record()


def epoch_of(state: object) -> int | None:
    """As a loader's state_dict says it, where it does."""
    epoch = state.get("epoch") if isinstance(state, dict) else None
    return epoch if type(epoch) is int else None


def versions() -> dict[str, str]:
    """Of what a run is made of, by name."""
    cuda = {"cuda": torch.version.cuda} if torch.version.cuda else {}
    return about.versions() | {"torch": str(torch.__version__), "numpy": np.__version__} | cuda
