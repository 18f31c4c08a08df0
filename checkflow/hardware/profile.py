"""Device profiles: the figures of one device that decide how long its operators and its copies take.

A profile is one YAML file. The bundled ones hold the figures of data sheets, unreduced, and beside them the fractions
of those figures that operators are taken to reach: 0.7 of the arithmetic peak, 0.8 of the memory bandwidth and 0.8 of
the link. These are round assumptions, the same for every device, made before any model was timed and never adjusted to
one. So is the launch latency, 5 us: what an operator costs eager PyTorch when it has next to nothing to do. Where the
device is at hand, measure.measure_profile replaces the assumptions by measurements.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import yaml
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter

from checkflow.counts import PositiveAmount
from checkflow.errors import FormatError, InputError
from checkflow.jsonfile import is_there, read_text, validate, write_text

_FOLDER = Path(__file__).parent
NAMES = tuple(sorted(path.stem for path in _FOLDER.glob("*.yaml")))

Fraction = Annotated[float, Field(gt=0, le=1)]
Text = Annotated[str, Field(min_length=1)]


class _Strict(BaseModel):
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid")


class PeakFlops(_Strict):
    """Floating-point operations a second by dtype, as PyTorch computes matrix products by default.

    float32 without TF32; float16, bfloat16 and float64 on tensor cores where the device has them for that dtype. (For
    convolutions PyTorch does allow TF32 by default; a profile does not tell these apart.)
    """

    float32: PositiveAmount
    float16: PositiveAmount
    bfloat16: PositiveAmount
    float64: PositiveAmount

    def of(self, dtype: str) -> int:
        """The peak for a dtype's name; any other dtype counts as float32."""
        match dtype:
            case "float16":
                return self.float16
            case "bfloat16":
                return self.bfloat16
            case "float64" | "complex128":
                return self.float64
            case _:
                return self.float32


class Efficiency(_Strict):
    """Fractions, in (0, 1], of the nominal figures that are reached."""

    compute: Fraction
    memory: Fraction
    link: Fraction


class Network(_Strict):
    """What joins devices, where several train together. Rates are nominal, a device's, in one direction.

    Nothing is taken off them: a collective that is shown slower than it is would show more time for checkpoints than
    there is.
    """

    devices_per_node: PositiveAmount
    within_node_bytes_per_s: PositiveAmount
    between_nodes_bytes_per_s: PositiveAmount  # by its own adapter, or its share of them
    within_node_ns: PositiveAmount  # latency of one message
    between_nodes_ns: PositiveAmount
    host_memory_bandwidth_bytes_per_s: PositiveAmount  # of a node, which its devices' links share


class Profile(_Strict):
    """One device. Rates are nominal: what operators and copies get is the rate times its efficiency."""

    name: Text
    description: Text
    peak_flops_per_s: PeakFlops
    memory_bandwidth_bytes_per_s: PositiveAmount
    memory_bytes: PositiveAmount
    launch_latency_ns: PositiveAmount
    link_bandwidth_bytes_per_s: PositiveAmount  # device to host, one direction
    efficiency: Efficiency
    source: Text
    network: Network | None = None


@dataclass(frozen=True, slots=True)
class CopyRates:
    """What copies get on a device, and its memory: a part of its profile, with efficiency in it."""

    link_bytes_per_s: int  # device to host, one direction
    memory_bytes_per_s: int
    memory_bytes: int


def load_profile(name_or_path: str) -> Profile:
    """The profile of a bundled device (one of NAMES), or of a YAML file.

    Raises:
        InputError: no such device, or a file that cannot be read.
        FormatError: not YAML, a field that is missing, unknown, or not a positive number; or a bundled device's name
            with other figures, since graphs and schedules tell devices apart by their names.
    """
    if name_or_path in NAMES:
        return _read(_FOLDER / f"{name_or_path}.yaml")
    path = Path(name_or_path)
    if _may_be_file(path) or path.suffix in (".yaml", ".yml") or path.name != name_or_path:
        profile = _read(path)
        if profile.name in NAMES and _figures(profile) != _figures(load_profile(profile.name)):
            raise FormatError(
                f"{path}: field name: {profile.name!r} is a bundled device's, whose figures are others; give it a name "
                "of its own"
            )
        return profile
    raise InputError(
        f"device: {name_or_path!r} is not known; choose one of {', '.join(NAMES)}, or give the path of a YAML file"
    )


def _may_be_file(path: Path) -> bool:
    """Reading it says what is wrong with one that nobody can look for."""
    try:
        return is_there(path)
    except OSError:
        return True


def _figures(profile: Profile) -> dict[str, object]:
    return profile.model_dump(exclude={"description", "source"})


def write_profile(path: Path, profile: Profile) -> None:
    """Write a profile as YAML, whole or not at all. Raises InputError where it cannot be written."""
    header = (
        "# A device profile of checkflow. Rates are nominal; what operators get is the rate times its efficiency.\n"
    )
    write_text(
        path, header + yaml.safe_dump(profile.model_dump(exclude_none=True), sort_keys=False, allow_unicode=True)
    )


def _read(path: Path) -> Profile:
    try:
        # The loader is a SafeLoader: it makes plain values only.
        document = yaml.load(read_text(path), Loader=_UniqueKeyLoader)
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        raise FormatError(f"{path}: is not YAML ({_first_line(error)}); write it again") from None
    try:
        return validate(TypeAdapter(Profile), document, str(path))
    except (TypeError, ValueError, RecursionError) as error:
        raise FormatError(
            f"{path}: holds a value that is no text or number ({_first_line(error)}); correct it"
        ) from None


def _first_line(error: Exception) -> str:
    if isinstance(error, yaml.MarkedYAMLError) and error.problem and error.problem_mark:
        return f"line {error.problem_mark.line + 1}: {error.problem}"
    return (str(error) or type(error).__name__).splitlines()[0]


class _UniqueKeyLoader(yaml.SafeLoader):
    """A SafeLoader that refuses a key that stands twice in one mapping."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, object]:
        mapping: dict[Hashable, object] = super().construct_mapping(node, deep=deep)
        if len(mapping) != len(node.value):
            raise yaml.constructor.ConstructorError(None, None, "a key stands twice", node.start_mark)
        return mapping
