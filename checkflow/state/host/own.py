"""What an optimizer keeps under a text, for the host's record: its values, and which of its tensors files hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from operator import is_

import torch

from checkflow.errors import InputError
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import MAX_TENSOR_BYTES, Json, Named, Recorded, Stored, dump
from checkflow.state.names import StateName
from checkflow.state.own import key_name, own_entries, own_of, where_of


class OwnReader:
    """Reads it at each checkpoint, all of it: nothing tells of a number that has changed.

    Args:
        prefix: "optimizer", or "optimizer.1" of several.
        optimizer: the live one.
        names: id(parameter) -> "model/features.0.weight".
        stored: whether a file holds the tensor of a state name, "optimizer/.state.k".
    """

    def __init__(
        self,
        prefix: str,
        optimizer: torch.optim.Optimizer,
        names: Mapping[int, StateName],
        stored: Callable[[StateName], bool],
    ) -> None:
        self._prefix = prefix
        self._optimizer = optimizer
        self._names = names
        self._is_stored = stored
        self._stored: list[str] = []  # as of the last reading
        self._apart: list[str] = []
        self._seen: tuple[torch.Tensor, ...] = ()

    @property
    def structure(self) -> tuple[str, ...]:
        """Changes when other tensors than before have to be found in the files."""
        return tuple(self._stored)

    def tensors(self) -> dict[StateName, torch.Tensor]:
        """Those that are there now, which `changed` compares with."""
        found = {name: tensor for name, tensor, _, _ in own_entries(self._prefix, self._optimizer, self._names)}
        self._seen = tuple(found.values())
        return found

    def changed(self) -> bool:
        """Whether there are others than `tensors` found last."""
        now = [tensor for _, tensor, _, _ in own_entries(self._prefix, self._optimizer, self._names)]
        return len(now) != len(self._seen) or not all(map(is_, now, self._seen))

    def read(self) -> str:
        """OwnRecord's JSON as a field, or nothing. Raises InputError that names what cannot be saved."""
        self._stored, self._apart = [], []
        where, values = where_of(self._prefix, self._optimizer), dict[str, Json]()
        for key, value in own_of(self._optimizer).items():
            marked = self._marked(value, StateName.of_own(self._prefix, key))
            values[key] = encode(marked, f"{where}: {key}")
        if not values:
            return ""
        return f',"own":{dump({"values": values, "apart": list(self._apart)})}'

    def _marked(self, value: object, name: StateName) -> object:
        """The same with names in the place of tensors that files hold, and of parameters that are keys."""
        if isinstance(value, torch.Tensor):
            return self._tensor(value, name)
        if type(value) is dict:
            found: dict[object, object] = {}
            for key, item in value.items():
                called = key_name(key, self._prefix, self._optimizer, self._names)
                marked = Named(str(called)) if isinstance(key, torch.Tensor) else key
                found[marked] = self._marked(item, name.inside(called))
            return found
        if type(value) is list or type(value) is tuple:
            return type(value)(self._marked(item, name.inside(index)) for index, item in enumerate(value))
        return value

    def _tensor(self, value: torch.Tensor, name: StateName) -> Stored | Recorded:
        if value.device.type == "cpu" and self._beside().type != "cpu":
            self._apart.append(name.path)
        if self._is_stored(name):
            self._stored.append(name.path)
            return Stored(name.path)
        if value.numel() * value.element_size() > MAX_TENSOR_BYTES:
            raise InputError(
                f"{name}: a tensor of shape {tuple(value.shape)} is neither in a file of the checkpoint nor small; "
                "compile and attach with the state as it is now"
            )
        return Recorded(value.detach().cpu())

    def _beside(self) -> torch.device:
        """Where its parameters are."""
        parameters = (parameter for group in self._optimizer.param_groups for parameter in group["params"])
        return next((parameter.device for parameter in parameters), torch.device("cpu"))
