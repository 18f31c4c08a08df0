"""JSON files that a person can read in a diff, written atomically and read strictly.

A document is an object; a list in it is written one row to a line. The digest is over the canonical form, so that
white space and key order do not matter.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import stat
import tempfile
from collections.abc import Iterable, Mapping
from itertools import combinations
from pathlib import Path
from typing import TypeVar

from pydantic import TypeAdapter, ValidationError

from checkflow import strictjson
from checkflow.errors import FormatError, InputError, remedy

type_of = TypeVar("type_of")
_BEGUN = ".checkflow-"  # a file that is not whole yet: with the whole name of the user's, its own could be too long


def digest_of(document: object) -> str:
    """SHA-256 of a JSON value's canonical form, as "sha256:<hex>"."""
    canonical = json.dumps(document, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return "sha256:" + hashlib.sha256(canonical.encode()).hexdigest()


def render(document: Mapping[str, object]) -> str:
    """The document as text: a key to a line, lists of rows one row to a line."""
    return "{\n" + ",\n".join(f" {json.dumps(key)}: {_value(value)}" for key, value in document.items()) + "\n}\n"


def _value(value: object) -> str:
    if isinstance(value, list) and value and isinstance(value[0], (dict, list)):
        return "[\n" + ",\n".join(f"  {json.dumps(row, allow_nan=False)}" for row in value) + "\n ]"
    return json.dumps(value, allow_nan=False)


def is_there(path: Path, *, follow_symlinks: bool = True) -> bool:
    """Raises OSError where that cannot be told: of a name that is too long, or a loop of links."""
    try:
        path.stat(follow_symlinks=follow_symlinks)
    except (FileNotFoundError, NotADirectoryError, ValueError):  # a zero byte, which no name has
        return False
    return True


def check_output(path: Path, suffixes: tuple[str, ...] = ()) -> None:
    """Raise InputError, before any long work, where a file could not be written, or has none of the suffixes."""
    if suffixes and path.suffix not in suffixes:
        raise InputError(f"{path}: its name has to end in {' or '.join(suffixes)}")
    try:
        is_there(path)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another output") from None
    if os.path.isdir(path):  # noqa: PTH112 (never raises)
        raise InputError(f"{path}: is a directory; name a file in it")
    target = Path(os.path.realpath(path))
    is_stream = _is_stream(path)
    if os.path.exists(target) and not (is_stream or os.path.isfile(target)):  # noqa: PTH110, PTH113 (never raise)
        raise InputError(f"{path}: is no regular file; choose another output")
    if not os.access(path if is_stream else target.parent, os.W_OK):
        raise InputError(f"{path}: cannot be written, its folder is missing or not writable; choose another output")


def check_outputs(inputs: Iterable[Path], *outputs: Path, appended: Iterable[Path] = ()) -> None:
    """Raise InputError, before any long work, where outputs could not be written, or one would be lost in another file.

    Args:
        inputs: files that are read.
        outputs: files that are written anew.
        appended: files that grow. Who appends to them says where they cannot be written.
    """
    for path in outputs:
        check_output(path)
    read, written = list(inputs), [path for path in (*outputs, *appended) if not _is_stream(path)]
    for path in written:
        if any(_is_same(path, each) for each in read):
            raise InputError(f"{path}: is read, and would be overwritten; choose another output")
    for one, other in combinations(written, 2):
        if _is_same(one, other):
            raise InputError(f"{other}: two outputs would be written there; give each a file of its own")


def _is_same(one: Path, other: Path) -> bool:
    try:
        return os.path.realpath(one) == os.path.realpath(other) or one.samefile(other)
    except OSError:  # one of them is not there
        return False


def _is_stream(path: Path) -> bool:
    """Whether what is written there goes on to somebody: a device as /dev/null is, a pipe, our own standard output."""
    try:
        found = path.stat()
    except OSError:
        return False
    return stat.S_ISCHR(found.st_mode) or stat.S_ISFIFO(found.st_mode) or _descriptor_of(found) is not None


def _descriptor_of(found: os.stat_result) -> int | None:
    """That of our standard output or error, where one is this file: replaced, it would lose what else is said."""
    for descriptor in (1, 2):
        with contextlib.suppress(OSError):  # closed
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
    return None


def write_text(path: Path, text: str) -> None:
    """Write a text file as `write_bytes` does."""
    write_bytes(path, text.encode())


def write_bytes(path: Path, content: bytes) -> None:
    """Write a file whole or not at all; one that a link names is written, and the link stays. Devices get the bytes.

    Raises InputError where it cannot be written.
    """
    try:
        if _is_stream(path):
            descriptor = _descriptor_of(path.stat())
            with open(path if descriptor is None else os.dup(descriptor), "wb") as stream:  # noqa: PTH123
                stream.write(content)
        else:
            _replace(Path(os.path.realpath(path)), content)
    except OSError as error:
        raise InputError(f"{path}: cannot be written ({error.strerror}); choose another output") from None


def _replace(path: Path, content: bytes) -> None:
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=_BEGUN)
    try:
        with os.fdopen(handle, "wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        mask = os.umask(0)
        os.umask(mask)
        Path(temporary).chmod(0o666 & ~mask)
        Path(temporary).replace(path)
    except BaseException:
        _discard(temporary)
        raise


def folder_beside(path: Path) -> tempfile.TemporaryDirectory[str]:
    """For what is to be moved to the path once it is whole. Raises OSError where none can be made."""
    return tempfile.TemporaryDirectory(dir=path.parent, prefix=_BEGUN, ignore_cleanup_errors=True)


def _discard(temporary: str) -> None:
    with contextlib.suppress(OSError):
        Path(temporary).unlink()


def check_no_device(path: Path) -> None:
    """Raises InputError for one, whose bytes may have no end; OSError where nobody can look."""
    if path.is_char_device() or path.is_block_device():
        raise InputError(f"{path}: is a device; give a file")


def read_text(path: Path) -> str:
    """The file's text. Raises InputError where it cannot be read."""
    try:
        check_no_device(path)
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(
            f"{path}: cannot be read ({error.strerror}); {remedy(error, 'check the path', 'read')}"
        ) from None
    except UnicodeDecodeError:
        raise FormatError(f"{path}: is not UTF-8 text; give a JSON or YAML file that checkflow wrote") from None


def parse_json(path: Path, format_name: str, *versions: int) -> dict[str, object]:
    """The JSON object in a file that names its format and version. Raises FormatError unless both are as expected."""
    try:
        document = strictjson.loads(read_text(path))
    except ValueError as error:
        raise FormatError(f"{path}: is not JSON or is cut short ({error}); write it again") from None
    if not isinstance(document, dict) or document.get("format") != format_name:
        raise FormatError(f"{path}: is not a {format_name} file; its field 'format' has to say {format_name!r}")
    if document.get("version") not in versions or isinstance(document.get("version"), bool):
        raise FormatError(
            f"{path}: version {document.get('version')!r} is not supported, only {' and '.join(map(str, versions))}; "
            "make it again with this checkflow"
        )
    return dict(document)


def validate(adapter: TypeAdapter[type_of], value: object, source: str) -> type_of:
    """The value as the adapter's type. Raises FormatError that names the first wrong field."""
    try:
        return adapter.validate_json(json.dumps(value), strict=True)
    except ValidationError as error:
        first = error.errors()[0]
        where = " ".join(".".join(str(part) for part in first["loc"]).split()) or "the document"
        reason = first["msg"][:1].lower() + first["msg"][1:]
        raise FormatError(f"{source}: field {where}: {reason}; correct it") from None
