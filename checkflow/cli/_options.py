"""Options that several commands share, and how their text becomes values."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from checkflow.errors import InputError
from checkflow.given import check_no_home
from checkflow.units import parse_bytes, parse_ns, parse_rate

Command = TypeVar("Command", bound=Callable[..., object])
Value = TypeVar("Value")

MOST_WHOLE = 10**9


class Size(click.ParamType[int]):
    """16MiB"""

    name = "SIZE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        return value if isinstance(value, int) else parse_bytes(str(value), _name(param))


class Rate(click.ParamType[int]):
    """63GB/s"""

    name = "RATE"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        return value if isinstance(value, int) else parse_rate(str(value), _name(param))


class Duration(click.ParamType[int]):
    """3h, in nanoseconds"""

    name = "TIME"

    def __init__(self, *, positive: bool = False) -> None:
        self._is_positive = positive

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:  # noqa: ARG002
        found = value if isinstance(value, int) else parse_ns(str(value), _name(param))
        if self._is_positive and found < 1:
            raise InputError(f"{_name(param)} {value}: is not positive; write it like 3h")
        return found


class Share(click.ParamType[float]):
    """0.5, of failures"""

    name = "FLOAT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        found = float(click.FLOAT(value, param, ctx) or 0.0)
        if not 0 <= found <= 1:
            raise InputError(f"{_name(param)} {found}: is not in [0, 1]; 0.5 is every other failure")
        return found


class GivenPath(click.Path):
    """A path; "" is none: a shell has that for a variable that was never set. Nor is ~, which it puts your home for."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        _check_given(value, param, "a path")
        return super().convert(value, param, ctx)


class OutputPath(GivenPath):
    """A path that is written; "-" would be a file of that name, and who gives it means another."""

    def __init__(self) -> None:
        super().__init__(path_type=Path)

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> str | bytes | os.PathLike[str]:
        if value == "-":
            raise InputError(f"{_name(param)} -: is no file's name; ./- is one, and /dev/stdout is standard output")
        return super().convert(value, param, ctx)


class GivenName(click.ParamType[str]):
    """A file or a name that is looked up; not "" either."""

    name = "TEXT"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> str:  # noqa: ARG002
        _check_given(value, param, "a file, or a name")
        return str(value)


def was_given(*names: str) -> bool:
    """Whether any of these parameters of the running command was, so that it has not its default."""
    source = click.get_current_context().get_parameter_source
    return any(source(name) is click.core.ParameterSource.COMMANDLINE for name in names)


def _check_given(value: object, param: click.Parameter | None, what: str) -> None:
    name = param.human_readable_name.strip("[].") if isinstance(param, click.Argument) else _name(param)
    check_no_home(name, str(value))
    if value == "":
        raise InputError(f"{name}: is empty; give {what}")


def _name(param: click.Parameter | None) -> str:
    return param.opts[-1] if param is not None else "value"


def model_options(command: Command) -> Command:
    """MODEL and what its factory is given."""
    command = click.option("--batch-size", metavar="N", help="Short for --set batch_size=N.")(command)
    command = click.option(
        "--set", "settings", multiple=True, metavar="NAME=VALUE", help="An argument of the training factory."
    )(command)
    return click.argument("model", type=GivenName())(command)


def trace_options(command: Command) -> Command:
    """How the iteration is traced and timed."""
    command = click.option(
        "--real", is_flag=True, help="Trace with real tensors (where data decide what runs, this happens by itself)."
    )(command)
    return click.option(
        "--device",
        type=GivenName(),
        metavar="NAME|FILE|measure",
        help="Profile whose times the operators get (a bundled name, or a YAML file that `checkflow profile` wrote), "
        "or measure: time them on this machine.  [default: rtx3090, or the times that a graph has]",
    )(command)


def ranks_options(command: Command) -> Command:
    """In whose place a model file is run."""
    command = click.option(
        "--divided",
        is_flag=True,
        help="Each rank saves a share of the state that all have alike; they share a disk.",
    )(command)
    command = click.option("--rank", type=int, metavar="R", help="Of these ranks, the one to trace  [default: 0]")(
        command
    )
    return click.option(
        "--world-size", type=int, metavar="N", help="Run MODEL as one of N ranks, over a group that moves nothing."
    )(command)


def json_option(command: Command) -> Command:
    return click.option("--json", "as_json", is_flag=True, help="Print one JSON object; progress goes to stderr.")(
        command
    )


def settings_of(settings: tuple[str, ...], batch_size: str | None) -> dict[str, str]:
    """Factory arguments from --set and --batch-size. Raises InputError unless each is NAME=VALUE, once."""
    pairs = [("batch_size", batch_size)] if batch_size is not None else []
    for text in settings:
        name, equals, value = text.partition("=")
        if not equals or not name.isidentifier():
            raise InputError(f"--set {text}: is not NAME=VALUE; write it like --set batch_size=32")
        pairs.append((name, value))
    found: dict[str, str] = {}
    for name, value in pairs:
        if name in found:
            raise InputError(f"--set {name}: given twice; give it once")
        found[name] = value
    return found


def default_output(model: str, kind: str) -> Path:
    """What a command writes where -o does not say: "nets/net.py:small" -> net-small.<kind>.json, in this folder."""
    name = re.sub(r"\.py(?=:|$)|(\.graph)?\.json$", "", Path(model).name)
    return Path(f"{name.replace(':', '-')}.{kind}.json")


def list_of(text: str, convert: Callable[[str], Value], option: str) -> tuple[Value, ...]:
    """ "1,32" -> (1, 32), each once. Raises InputError where a value is missing or wrong."""
    parts = [part.strip() for part in text.split(",")]
    if not all(parts):
        raise InputError(f"{option} {text!r}: a value is missing; separate values by single commas, like 1,32")
    return tuple(dict.fromkeys(convert(part) for part in parts))


def interval_of(text: str) -> int | None:
    """ "auto" -> None, "2" -> 2. Raises InputError otherwise."""
    if text == "auto":
        return None
    return _whole("--interval", text, "is neither a positive whole number nor auto", "write it like 1, or auto")


def positive_of(option: str, text: str) -> int:
    """ "8" -> 8. Raises InputError otherwise."""
    return _whole(option, text, "is not a positive whole number", "write it like 8")


def _whole(option: str, text: str, wrong: str, instead: str) -> int:
    if not (text.isascii() and text.isdecimal() and text.strip("0")):
        raise InputError(f"{option} {text}: {wrong}; {instead}")
    if len(text) > len(str(MOST_WHOLE)) or int(text) > MOST_WHOLE:
        raise InputError(f"{option} {text}: is more than {MOST_WHOLE}; {instead}")
    return int(text)
