"""Iterations in which no attached optimizer makes an update, as where a scaler skips it, and what they may mean.

Gradients are dropped then, or zeroed. Where they are written to instead, `step()` may be called for each part of a
batch: no checkpoint has gradients, so a resume from there goes on without them. And where parameters are written all
the same, time after time, another optimizer may make the updates, whose state is in no checkpoint. Where nothing was
ever written, and there are no gradients, something else may be trained than what was attached. So it may where another
training was refused the store of this one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from checkflow.runtime.unwritten import Unwritten, address_and_version
from checkflow.state.live import parameters_of
from checkflow.state.names import StateName
from checkflow.state.shards import gradient_of, local
from checkflow.torch_internals import versions
from checkflow.training import Training
from checkflow.wrapped import is_hookable

TIMES = 3  # that parameters are written in a row
STILL = 50  # iterations, of the first ones, without a gradient or a write: more than a scaler skips
FEW = 5  # iterations in which nothing is written, from when another training was refused
_OTHER = "close() this Checkpointer, and attach the model that is trained"


class WithoutUpdate:
    """Tells of each once. Iterations with an update cost nothing here, unless the one before had none."""

    def __init__(self, training: Training, tell: Callable[[str], None]) -> None:
        self._training = training
        self._tell = tell
        self._knows = all(map(is_hookable, training.optimizers))  # of updates
        self._told: set[str] = set()
        self._updated = False  # since the last iteration ended
        self._gradient: tuple[StateName, torch.nn.Parameter, tuple[int, int]] | None = None  # as it was then
        self._parameter: tuple[StateName, torch.nn.Parameter, int] | None = None  # as it was, and its version
        self._written = 0  # times in a row
        self._still: int | None = 0  # iterations in a row; None once there was an update
        self._seen: Unwritten | None = None  # all of it, when these began
        self._doubted: Unwritten | None = None  # when another training was refused; None once this one is trained
        self._idle = 0  # iterations since

    def updated(self) -> None:
        """An optimizer has made an update. Its gradients are still there."""
        self._compare_gradient()
        self._updated, self._doubted = True, None

    def doubt(self) -> None:
        """Another training was refused, and may be trained from now on."""
        self._doubted, self._idle = Unwritten(self._training), 0

    def restored(self) -> None:
        """What was written since, a restore has."""
        if self._doubted is not None:
            self.doubt()

    def saved(self) -> None:
        """The user asks for a checkpoint of what was trained."""
        if self._doubted is not None and self._doubted.still() and self._idle:
            self._tell(
                "save: attach() has refused another model, and nothing that is attached had an update since: the "
                f"checkpoint is of the model that was attached; {_OTHER}"
            )

    def ended(self) -> None:
        """An iteration ended."""
        self._compare_gradient()
        if self._doubted is not None and self._idle < FEW:
            self._compare_doubted(self._doubted)
        if self._updated or not self._knows:
            self._updated, self._parameter, self._written, self._still = False, None, 0, None
            return
        self._compare_parameter()
        for name, parameter in parameters_of(self._training):
            if self._gradient is None and (gradient := gradient_of(parameter)) is not None:
                self._gradient = name, parameter, address_and_version(gradient)
            if parameter.requires_grad and self._parameter is None:
                self._parameter = name, parameter, versions([local(parameter)])[0]
        self._compare_all()

    def _compare_gradient(self) -> None:
        """Another gradient in the same memory begins with a version that is no higher."""
        if self._gradient is None:
            return
        name, parameter, (address, version) = self._gradient
        self._gradient = None
        gradient = gradient_of(parameter)
        if gradient is None:
            return
        now = address_and_version(gradient)
        if now[0] == address and now[1] > version:
            self._say_once(
                "gradient",
                f"{name}: its gradient was written to after a step() without an update; where gradients are added up "
                "there, no checkpoint has them, and a resume goes on without them: call step() once for each update",
            )

    def _compare_parameter(self) -> None:
        if self._parameter is None:
            return
        name, parameter, version = self._parameter
        self._parameter = None
        self._written = self._written + 1 if versions([local(parameter)])[0] > version else 0
        if self._written >= TIMES:
            self._say_once(
                "parameter",
                f"{name}: is written though no attached optimizer makes an update; where another one does, its state "
                "is in no checkpoint: attach that one",
            )

    def _compare_doubted(self, then: Unwritten) -> None:
        if not then.still():
            self._doubted = None
            return
        self._idle += 1
        if self._idle == FEW:
            self._tell(
                f"{FEW} iterations have ended since attach() has refused another model, and nothing that is attached "
                "had an update, a gradient, or a parameter that was written: what is trained is in no checkpoint; "
                f"{_OTHER}"
            )

    def _compare_all(self) -> None:
        if self._still is None:
            return
        if self._gradient is not None or self._parameter is None or self._written:
            self._still = 0
            return
        self._still += 1
        if self._still not in (1, STILL):
            return
        if self._still == 1:
            self._seen = Unwritten(self._training)
        elif self._seen is None or not self._seen.still():
            self._still = 0
        else:
            self._say_once(
                "nothing",
                f"{STILL} iterations have ended, and nothing that is attached had an update, a gradient, or a "
                "parameter that was written; where another model is trained, such as a copy of this one, attach that "
                "and its optimizer",
            )

    def _say_once(self, of: str, line: str) -> None:
        if of not in self._told:
            self._told.add(of)
            self._tell(line)
