"""The MODEL argument: a file with a training factory (`model.py`, `model.py:factory`) or a bundled name (`bert`)."""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.util
import inspect
import os
import re
import sys
import sysconfig
import traceback
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, redirect_stdout, suppress
from dataclasses import dataclass, replace
from pathlib import Path, PurePath
from types import NoneType, UnionType
from typing import TYPE_CHECKING, NoReturn

import yaml

from checkflow import hardware, models, workdir
from checkflow.errors import CheckflowError, InputError, ModelFileError
from checkflow.jsonfile import is_there
from checkflow.missing import asked_for
from checkflow.spelling import setting
from checkflow.text import brief, said

if TYPE_CHECKING:
    from checkflow.training import Training  # imports torch, as models do; a sweep of graphs has no need of it

DEFAULT_FACTORY = "training"
PACKAGE = Path(__file__).resolve().parent
_INSTALLED = (Path(sysconfig.get_path("stdlib")), PACKAGE)
_TYPES = (str, int, float, bool)
_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")


@dataclass(frozen=True)
class Source:
    """A factory, and the name and arguments by which a report speaks of it."""

    name: str
    arguments: tuple[tuple[str, str], ...]
    factory: Callable[[], Training]


def load(model: str, settings: Mapping[str, object]) -> Source:
    """The factory that MODEL names, with its arguments bound.

    Args:
        model: a path, a path with ":factory", or a bundled name.
        settings: factory arguments; text ({"batch_size": "32"}) is converted by the factory's annotations.

    Raises:
        ModelFileError: the file or its factory is wrong.
        InputError: an argument that the factory does not take, or a value of the wrong type.
    """
    source = _bound(*_find(model), settings)

    def alone() -> Training:
        with _own_arguments(model.rpartition(":")[0] or model):
            return source.factory()

    return replace(source, factory=alone)


def of(factory: Callable[..., Training], settings: Mapping[str, object]) -> Source:
    """A factory that is at hand, with its arguments bound.

    Raises as `load` does, and where it gives what goes on: tracing trains that, on fake tensors or on real ones.
    """
    if not callable(factory):
        raise InputError(
            f"model: is a {type(factory).__name__}; give the function that makes the Training, a path or a Graph"
        )
    name = getattr(factory, "__qualname__", type(factory).__name__)
    source = _bound(name, factory, settings)

    def anew() -> Training:
        import torch

        kinds = (torch.nn.Module, torch.optim.Optimizer)
        before = [found for found in gc.get_objects() if issubclass(type(found), kinds)]
        made = source.factory()
        parts = [part for model in made.models for part in model.modules()]
        given = {id(found) for found in before} & {id(part) for part in (*parts, *made.optimizers)}
        if given:
            kind = next(type(found).__name__ for found in before if id(found) in given)
            raise InputError(
                f"{name}: returns a {kind} that was there before, which tracing would change; build models and "
                "optimizers inside the function"
            )
        return made

    return Source(source.name, source.arguments, anew)


def _bound(name: str, make: Callable[..., object], settings: Mapping[str, object]) -> Source:
    bound = _bind(name, make, settings)

    def factory() -> Training:
        from checkflow.training import Training

        made = bound()
        if inspect.iscoroutine(made):
            made.close()  # it would warn that nobody awaited it
        if not isinstance(made, Training):
            raise ModelFileError(
                f"{name}: its factory returned {type(made).__name__}; return checkflow.Training(model, optimizer, "
                "iteration)"
            )
        return made

    return Source(name, tuple(sorted((key, str(value)) for key, value in settings.items())), factory)


@contextmanager
def users_modules() -> Iterator[list[Path]]:
    """Collects, when it ends, the files of the modules imported inside that are the user's own, and forgets these.

    The next model may have another module of the same name in its own folder. The working directory is as before, too.
    """
    import torch  # noqa: F401 (is nobody's own, wherever it is installed)

    known, path, files = set(sys.modules), list(sys.path), list[Path]()
    try:
        with workdir.kept():
            yield files
    finally:
        for name in set(sys.modules) - known:
            file = getattr(sys.modules[name], "__file__", None)
            if file and file.endswith(".py") and _is_users(Path(file).resolve()):
                files.append(Path(file).resolve())
                del sys.modules[name]
        sys.path[:] = path


def _is_users(path: Path) -> bool:
    installed = {"site-packages", "dist-packages"}.intersection(path.parts)
    return not installed and not any(path.is_relative_to(folder) for folder in _INSTALLED)


def _find(model: str) -> tuple[str, Callable[..., object]]:
    if model in models.NAMES:
        return model, models.factory(model)
    text, _, attribute = model.rpartition(":") if not is_file(model) and ":" in model else (model, "", "")
    path, attribute = Path(text), attribute or DEFAULT_FACTORY
    if not is_file(text):
        if all(part.isidentifier() for part in text.split(".")) and "." in text and not text.endswith(".py"):
            beside = text.replace(".", "/")
            raise ModelFileError(
                f"{text}: is no file; give a module as one, like {beside}.py, without relative imports"
            )
        bundled = f"give a file or a bundled model ({', '.join(models.NAMES)})"
        if not text:
            raise ModelFileError(f"model: is empty; {bundled}")
        try:
            other = is_there(path)
        except OSError as error:
            raise ModelFileError(f"{text}: cannot be read ({error.strerror}); {bundled}") from None
        if other:
            raise ModelFileError(f"{text}: is no file, but a directory or a device; {bundled}")
        raise ModelFileError(f"{text}: no such file, and no bundled model of that name; {bundled}")
    if path.suffix == ".ipynb":
        raise ModelFileError(
            f"{text}: is a notebook; give its training() in a .py file (jupyter nbconvert --to script)"
        )
    namespace = _run_file(path)
    if attribute not in namespace:
        raise ModelFileError(f"{path}: has no function {attribute!r}; define {attribute}() -> checkflow.Training")
    made = namespace[attribute]
    if not callable(made):
        raise ModelFileError(f"{path}: {attribute!r} is not a function; define {attribute}() -> checkflow.Training")
    name = os.fsencode(path.name).decode(errors="backslashreplace")  # graphs are UTF-8, and names of files need not be
    return f"{name}:{attribute}" if attribute != DEFAULT_FACTORY else name, made


def is_file(text: str) -> bool:
    """Whether MODEL is one as it stands; what cannot be told is none: with its factory's name, that may be too long."""
    return os.path.isfile(text)  # noqa: PTH113 (never raises)


def _run_file(path: Path) -> dict[str, object]:
    spec = importlib.util.spec_from_loader(f"checkflow_model_{path.stem}", loader=None, origin=str(path))
    assert spec is not None
    module = importlib.util.module_from_spec(spec)
    module.__file__ = str(path)
    folder, root = _folders(path)
    for each in (root, folder):
        if str(each) not in sys.path:
            sys.path.insert(0, str(each))  # the file's own first, and both also while its factory runs
    sys.modules[spec.name] = module  # dataclasses and pickles look their module up by name
    try:
        code = compile(path.read_bytes(), str(path), "exec", dont_inherit=True)  # its annotations are as it wrote them
    except SyntaxError as error:
        if error.lineno is None:  # null bytes
            raise ModelFileError(f"{path}: is not Python source ({error.msg}); give a model file") from None
        raise ModelFileError(f"{path}:{error.lineno}: syntax error: {error.msg}; correct the file") from None
    except (ValueError, OSError) as error:  # null bytes, or not to be read
        raise ModelFileError(f"{path}: is not Python source ({brief(error)}); give a model file") from None
    try:
        with _own_arguments(str(path)):
            exec(code, module.__dict__)
    except (CheckflowError, KeyboardInterrupt):  # it says where; it is the user's
        raise
    except SystemExit as error:
        raise ModelFileError(
            f"{where(error, path)}: importing it raised {brief(error)}; its command line is empty here: read it under "
            f"`if __name__`, and take values from {setting()} in the factory"
        ) from None
    except BaseException as error:  # noqa: BLE001 (whatever the user's file raises)
        if line := asked_for(error, where(error, path)):
            raise ModelFileError(line) from None
        relative = isinstance(error, ImportError) and "relative import" in said(error)
        by = "its name alone" if root == folder else f"its whole name, {'.'.join(folder.relative_to(root).parts)}.NAME"
        advice = f"import what lies beside it by {by}" if relative else "correct the file"
        raise ModelFileError(f"{where(error, path)}: importing it raised {brief(error)}; {advice}") from None
    return vars(module)


def _folders(path: Path) -> tuple[Path, Path]:
    """Where a file's imports look: in its own folder, as for `python FILE`, and in that which has its whole package."""
    folder = path.resolve().parent
    return folder, next((each for each in (folder, *folder.parents) if not (each / "__init__.py").is_file()), folder)


@contextmanager
def _own_arguments(file: str) -> Iterator[None]:
    """Within, sys.argv is that of `python FILE`: a file that reads it would take checkflow's options for its own.

    What argparse misses there is in the exception alone: the usage that it prints is not of what was typed.
    """
    given, told = sys.argv, argparse.ArgumentParser.error
    sys.argv, argparse.ArgumentParser.error = [file], _missed  # type: ignore[method-assign]
    try:
        yield
    finally:
        sys.argv, argparse.ArgumentParser.error = given, told  # type: ignore[method-assign]


def _missed(self: argparse.ArgumentParser, message: str) -> NoReturn:  # noqa: ARG001 (as argparse calls it)
    ended = SystemExit(message)
    ended.code = 2  # as argparse's own
    raise ended


def where(error: BaseException, path: Path) -> str:
    """file:line of the deepest frame of an exception that lies in the model file."""
    lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == str(path)]
    return f"{path}:{lines[-1]}" if lines else str(path)


def _bind(name: str, make: Callable[..., object], settings: Mapping[str, object]) -> functools.partial[object]:
    try:
        parameters = inspect.signature(make).parameters
    except (TypeError, ValueError):
        raise ModelFileError(f"{name}: its arguments cannot be told; define it with def") from None
    named = {key: each for key, each in parameters.items() if each.kind not in (each.VAR_KEYWORD, each.VAR_POSITIONAL)}
    any_other = next((each for each in parameters.values() if each.kind is each.VAR_KEYWORD), None)
    bound: dict[str, object] = {}
    for key, given in settings.items():
        parameter = named.get(key, any_other)
        if parameter is None:
            known = ", ".join(named) or "no arguments"
            raise InputError(f"{setting(key)}: {name} has no argument {key!r}; it takes {known}")
        bound[key] = _convert(key, given, parameter, make)
    missing = [key for key, each in named.items() if each.default is each.empty and key not in bound]
    if missing:
        raise InputError(f"{name}: its argument {missing[0]!r} has no default; give {setting(missing[0])}=VALUE")
    first = [bound.pop(key, each.default) for key, each in named.items() if each.kind is each.POSITIONAL_ONLY]
    return functools.partial(make, *first, **bound)


def _convert(key: str, given: object, parameter: inspect.Parameter, make: Callable[..., object]) -> object:
    if given is not None and not isinstance(given, _TYPES):
        raise InputError(
            f"{setting(key)}: a {type(given).__name__} is no plain value; bind it to the factory with functools.partial"
        )
    text = given if isinstance(given, str) else "null" if given is None else str(given)
    wanted = _wanted(parameter, make)
    value = _read(text, wanted)
    if wanted and not _is_one(value, wanted):
        kinds = " or ".join("None" if kind is NoneType else kind.__name__ for kind in wanted)
        example = "" if parameter.default in (parameter.empty, None) else f", like {parameter.default!r}"
        raise InputError(f"{setting(key)}: {text!r} is not of type {kinds}; give one{example}")
    if key == "batch_size" and isinstance(value, int) and value < 1:
        raise InputError(f"{setting(key)}: {text!r} is not positive; give a batch of at least 1")
    return value


def _wanted(parameter: inspect.Parameter, make: Callable[..., object]) -> tuple[type, ...]:
    """What an argument may be, as its annotation says, or its default; nothing where neither says it."""
    annotation = parameter.annotation
    if annotation is parameter.empty:
        kind = type(parameter.default)
        return (kind,) if kind in _TYPES or issubclass(kind, Path) else ()
    while isinstance(annotation, str):  # quoted, under annotations that are text anyway, is twice
        try:
            annotation = eval(annotation, getattr(inspect.unwrap(make), "__globals__", {}))
        except Exception:  # noqa: BLE001 (it names what only a type checker, or only the factory, imports)
            return ()
    return _kinds(annotation)


def _kinds(annotation: object) -> tuple[type, ...]:
    """The types of a union, an Optional or a Literal; of a list[int] the list. Nothing where one cannot be told."""
    if annotation is None:
        return (NoneType,)
    origin, inner = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is typing.Literal:
        return tuple(dict.fromkeys(map(type, inner)))
    if origin in (typing.Union, UnionType):
        found = [_kinds(each) for each in inner]
        return tuple(kind for kinds in found for kind in kinds) if all(found) else ()
    kind = origin or annotation
    return (kind,) if isinstance(kind, type) and kind is not object else ()


def _read(text: str, wanted: tuple[type, ...]) -> object:
    """Text as the first that it can be of None, bool, int, float, a path and text; as YAML where that is left open."""
    try:
        value = yaml.safe_load(text)
    except (ValueError, yaml.YAMLError):
        value = text
    if not wanted:
        return float(text) if isinstance(value, str) and _NUMBER.fullmatch(text) else value  # YAML's 1e-3 is text
    if (value is None and NoneType in wanted) or (isinstance(value, bool) and bool in wanted and str not in wanted):
        return value
    if bool in wanted and text.lower() in ("true", "false"):
        return text.lower() == "true"
    for kind in (int, float):
        if kind in wanted:
            with suppress(ValueError):
                return kind(text)
    path = next((kind for kind in wanted if issubclass(kind, PurePath) or kind is os.PathLike), None)
    if path is not None:
        return Path(text)
    return text if str in wanted else value


def _is_one(value: object, wanted: tuple[type, ...]) -> bool:
    kinds = tuple(kind for kind in wanted if kind is bool or not isinstance(value, bool))  # True is no number
    try:
        return isinstance(value, kinds)
    except TypeError:  # a protocol that cannot be asked
        return True


def inputs_of(asked: Iterable[object], devices: Iterable[str | None]) -> list[Path]:
    """The files among what MODEL and --device name, which no output may overwrite."""
    files = [Path(each) for each in devices if each is not None and each not in hardware.NAMES]
    for model in asked:
        if isinstance(model, (str, Path)) and str(model) not in models.NAMES:
            files += [Path(model), Path(str(model).rpartition(":")[0])]
    return [path for path in files if os.path.isfile(path)]  # noqa: PTH113 (never raises)


@contextmanager
def kept_from_stdout() -> Iterator[None]:
    """What the user's code prints is no part of the answer, and neither is what programs print that it starts."""
    with ExitStack() as undo:
        undo.enter_context(redirect_stdout(sys.stderr))
        with suppress(OSError):  # where one of them is closed
            kept = os.dup(1)
            undo.callback(os.close, kept)
            os.dup2(2, 1)
            undo.callback(os.dup2, kept, 1)
        yield
