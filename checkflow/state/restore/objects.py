"""The state of an attached object as it was: its tensors from files and record, each where it lay."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from checkflow.errors import FormatError, InputError
from checkflow.extra import Stateful, with_leaves
from checkflow.state.host.decode import decode_noting
from checkflow.state.host.json_values import Stored
from checkflow.state.host.objects import state_of
from checkflow.state.host.passes import own_type
from checkflow.state.host.record import ObjectRecord
from checkflow.state.memory import laid
from checkflow.state.names import is_of_kind
from checkflow.state.restore.files import FileTensor, TensorFile

_LOAD_ERRORS = (KeyError, ValueError, TypeError, RuntimeError, AssertionError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True)
class ObjectPlan:
    """What an object is to be given; `state` has FileTensors where the file has its tensors.

    `sets_otherwise`: whether a set in it iterates otherwise than when it was saved.
    """

    name: str
    member: Stateful
    state: dict[str, object]
    on_device: frozenset[str]
    leaves: frozenset[str]
    device: torch.device
    sets_otherwise: bool

    @property
    def is_loader(self) -> bool:
        return is_of_kind(self.name, "loader")

    def load(self) -> None:
        """Raises InputError where the object does not take it."""
        state = with_leaves(self.state, (torch.Tensor, FileTensor), self._made)
        assert isinstance(state, dict)
        try:
            self.member.load_state_dict(state)
            if self.is_loader:
                self.member.state_dict()  # torchdata makes its iterator now, and not where it would draw from the RNGs
        except _LOAD_ERRORS as error:
            reason = (str(error) or type(error).__name__).splitlines()[0]
            raise InputError(f"{self.name}: does not take the checkpoint's state ({reason:.200})") from None

    def _made(self, path: str, leaf: object) -> torch.Tensor:
        tensor = leaf
        if isinstance(leaf, FileTensor):
            tensor = leaf.view().clone() if leaf.order is None else laid(leaf.view(), leaf.order)
        assert isinstance(tensor, torch.Tensor)
        if path in self.on_device:
            tensor = tensor.to(self.device)
        return tensor.requires_grad_() if path in self.leaves else tensor


def match_object(member: Stateful, record: ObjectRecord, file: TensorFile, device: torch.device) -> ObjectPlan:
    """The plan; tensors that lay on a device go to this one. Raises InputError that names the first difference."""
    ours = own_type(member)
    if ours.lstrip("_") != record.type.lstrip("_"):  # who may use a class can change between versions
        raise InputError(f"{record.name}: is {ours}, {record.type} in the checkpoint; attach what was saved")
    state, sets_otherwise = decode_noting(record.state, record.name)
    if not isinstance(state, dict):
        raise FormatError(f"{record.name}: its state is no object; take another checkpoint")
    if isinstance(member, (torch.optim.lr_scheduler.LRScheduler, torch.amp.GradScaler)):
        for key in sorted(state.keys() ^ state_of(member).keys()):
            where = "in the checkpoint, but not here" if key in state else "here, but not in the checkpoint"
            raise InputError(f"{record.name}.{key}: is {where}; attach what was saved")

    def found(_path: str, leaf: object) -> FileTensor:
        assert isinstance(leaf, Stored)
        tensor = file.tensors.get(leaf.name)
        if tensor is None:
            raise FormatError(f"{record.name}: its file has no tensor {leaf.name!r:.200}; take another checkpoint")
        if leaf.order is not None and len(leaf.order) != len(tensor.shape):
            raise FormatError(f"{record.name}: {leaf.name!r:.200} has no order {leaf.order}; take another checkpoint")
        return replace(tensor, order=leaf.order)

    resolved = with_leaves(state, (Stored,), found)
    assert isinstance(resolved, dict)
    return ObjectPlan(
        record.name, member, resolved, frozenset(record.on_device), frozenset(record.leaves), device, sets_otherwise
    )
