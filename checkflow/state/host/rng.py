"""Every random generator that training may draw from: Python's, NumPy's and torch's global ones, and the user's own.

Reading a CUDA generator's state waits for nothing: seed and offset are kept on the host.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field

from checkflow.errors import FormatError, InputError
from checkflow.state.host.decode import bytes_of, decode
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import Json, RefusedError, base64_of, dump

_WORDS = struct.Struct("<625I")  # Mersenne Twister: 624 words and the position
_PYTHON_VERSION = 3  # of random.getstate


class PythonRng(BaseModel):
    """random.getstate()."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    words: str
    gauss: Annotated[float, Field(allow_inf_nan=False)] | None


class RngRecord(BaseModel):
    """States as base64; CUDA's by device number, the user's by name."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    python: PythonRng
    numpy: Json
    cpu: str  # torch's
    cuda: tuple[str, ...]
    generators: dict[str, str]


class RngReader:
    """Reads them at each checkpoint. Those of Python and NumPy are encoded anew only where they moved."""

    def __init__(self) -> None:
        self._python: tuple[object, str] = (None, "")  # a state and its text
        self._numpy: tuple[object, str] = (None, "")

    def read(self, generators: Mapping[str, torch.Generator]) -> str:
        """All states now, as RngRecord's JSON text, put together by hand: a dump would search all of it for escapes."""
        cuda = ",".join(f'"{_text(generator)}"' for generator in _cuda())
        own = ",".join(f'{dump(name)}:"{_text(generator)}"' for name, generator in generators.items())
        return (
            f'{{"python":{self._of_python()},"numpy":{self._of_numpy()},"cpu":"{_text(torch.default_generator)}",'
            f'"cuda":[{cuda}],"generators":{{{own}}}}}'
        )

    def _of_python(self) -> str:
        state = random.getstate()
        if state != self._python[0]:
            _, words, gauss = state
            self._python = state, f'{{"words":"{base64_of(_WORDS.pack(*words))}","gauss":{dump(gauss)}}}'
        return self._python[1]

    def _of_numpy(self) -> str:
        state = np.random.get_state(legacy=False)
        values = _values(state)
        if values != self._numpy[0]:
            self._numpy = values, dump(encode(state, "numpy.random"))
        return self._numpy[1]


def _values(state: object) -> object:
    """Of a state, to be compared."""
    if isinstance(state, dict):
        return [(key, _values(value)) for key, value in state.items()]
    return state.tobytes() if isinstance(state, np.ndarray) else state


def _text(generator: torch.Generator) -> str:
    return base64_of(generator.get_state().numpy().tobytes())


def _cuda() -> tuple[torch.Generator, ...]:
    if not torch.cuda.is_available() or not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return ()
    return tuple(torch.cuda.default_generators)


@dataclass(frozen=True)
class RngStates:
    """States that the generators take: each was tried on another generator."""

    python: tuple[object, ...]
    numpy: Mapping[str, object]
    cpu: torch.Tensor
    cuda: tuple[torch.Tensor, ...]
    generators: tuple[tuple[torch.Generator, torch.Tensor], ...]

    def restore(self) -> None:
        """Set them. Where there are fewer CUDA devices than there were, or more, the rest stays as it is."""
        random.setstate(self.python)
        np.random.set_state(self.numpy)  # type: ignore[arg-type]
        torch.default_generator.set_state(self.cpu)
        if self.cuda and torch.cuda.is_available():
            torch.cuda.init()  # type: ignore[no-untyped-call]
            for generator, state in zip(torch.cuda.default_generators, self.cuda, strict=False):
                generator.set_state(state)
        for generator, state in self.generators:
            generator.set_state(state)


def match_rng(record: RngRecord, generators: Mapping[str, torch.Generator]) -> RngStates:
    """The states to set. Raises InputError for another set of generators, FormatError for what is no state."""
    for name in sorted(record.generators.keys() ^ generators.keys()):
        where = (
            "the checkpoint, but not in this run" if name in record.generators else "this run, not in the checkpoint"
        )
        raise InputError(f"{name}: is in {where}; attach the same generators")
    with _reading("python"):
        *words, position = _WORDS.unpack(bytes_of(record.python.words))
        python = (_PYTHON_VERSION, (*words, position), record.python.gauss)
        random.Random().setstate(python)
    with _reading("numpy"):
        numpy = decode(record.numpy, "rng.numpy")
        if not isinstance(numpy, dict):
            raise RefusedError("is no state")
        _check_numpy(numpy)
    with _reading("cpu"):
        state = _state(record.cpu, torch.Generator())
    cuda: list[torch.Tensor] = []
    for number, text in enumerate(record.cuda):
        with _reading(f"cuda:{number}"):
            on_device = number < torch.cuda.device_count()
            cuda.append(_state(text, torch.Generator(f"cuda:{number}") if on_device else None))
    own: list[tuple[torch.Generator, torch.Tensor]] = []
    for name, generator in generators.items():
        with _reading(name):
            own.append((generator, _state(record.generators[name], torch.Generator(generator.device))))
    return RngStates(python, numpy, state, tuple(cuda), tuple(own))


@contextmanager
def _reading(name: str) -> Iterator[None]:
    try:
        yield
    except (RefusedError, ValueError, TypeError, KeyError, RuntimeError, struct.error) as error:
        reason = str(error).splitlines()[0]
        raise FormatError(f"rng.{name}: is no state of this generator ({reason}); take another checkpoint") from None


def _check_numpy(state: dict[str, object]) -> None:
    now = np.random.get_state(legacy=False)["bit_generator"]
    if state.get("bit_generator") != now:
        raise InputError(f"numpy.random: is {now}, {state.get('bit_generator')} in the checkpoint; use the same one")
    generator = getattr(np.random, str(now))
    np.random.RandomState(generator()).set_state(state)


def _state(text: str, probe: torch.Generator | None) -> torch.Tensor:
    state = torch.frombuffer(bytearray(bytes_of(text)), dtype=torch.uint8)
    if probe is not None:
        probe.set_state(state)
    return state
