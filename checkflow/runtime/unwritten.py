"""Whether anything of a training was written since: its parameters, their gradients, and tensors that it lists."""

from __future__ import annotations

import weakref

import torch

from checkflow.state.live import parameters_of
from checkflow.state.shards import gradient_of, local
from checkflow.torch_internals import versions
from checkflow.training import Training


class Unwritten:
    """As it is when this is made."""

    def __init__(self, training: Training) -> None:
        self._training = training
        self._tensors = [(weakref.ref(tensor), _version(tensor)) for tensor in self._tensors_now()]
        self._gradients = self._gradients_now()

    def still(self) -> bool:
        """Whether nothing was written since."""
        now = self._tensors_now()
        return (
            len(now) == len(self._tensors)
            and all(
                seen() is tensor and version == _version(tensor)
                for tensor, (seen, version) in zip(now, self._tensors, strict=True)
            )
            and self._gradients == self._gradients_now()
        )

    def _tensors_now(self) -> list[torch.Tensor]:
        return [*(parameter for _, parameter in parameters_of(self._training)), *self._training.listed.tensors_seen()]

    def _gradients_now(self) -> list[tuple[int, int] | None]:
        gradients = (gradient_of(parameter) for _, parameter in parameters_of(self._training))
        return [None if each is None else address_and_version(each) for each in gradients]


def address_and_version(gradient: torch.Tensor) -> tuple[int, int]:
    return gradient.data_ptr(), versions([gradient])[0]


def _version(tensor: torch.Tensor) -> int:
    """None is counted of an inference tensor, which only inference mode can write to."""
    return 0 if tensor.is_inference() else versions([local(tensor)])[0]
