"""A bucket that is a directory, by a URL: file:///path."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from checkflow.errors import InputError
from checkflow.store.both.held import same
from checkflow.store.both.lock import LOCK
from checkflow.store.format.ranks import parse_directory


def folder_of(url: str) -> Path | None:
    """Where it lies; None for a bucket that is no directory. Raises InputError for a URL that names none."""
    if url[:5].lower() != "file:":
        return None
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise InputError(f"bucket: {url}: {error}; write it like file:///path/of/a/directory") from None
    named = unquote_to_bytes(parts.path)
    if parts.netloc not in ("", "localhost") or not named.startswith(b"/") or b"\0" in named:
        raise InputError(f"bucket: {url} names no directory; write it like file:///path/of/a/directory")
    if parts.query or parts.fragment or url.endswith(("?", "#")):
        raise InputError(f"bucket: {url} has ? or # in its path; write %3F and %23 for these")
    path = os.fsdecode(named)
    if any("\udc80" <= letter <= "\udcff" for letter in path):
        raise InputError(f"bucket: {url}: its path is not UTF-8; choose another directory")
    return Path(os.path.normpath("/" + path.lstrip("/")))


def check_apart(url: str, folder: Path, store: Path) -> None:
    """Raises InputError for a directory that has anything to do with a store: each removes there what it has no use
    for. Links and mounts are looked through."""
    within, around = _lies_in(folder, store), _lies_in(store, folder)
    if within or around:
        what = "contains" if not within else "is" if around else "lies in"
        raise InputError(f"bucket: {url} {what} the store, {store}; give a directory beside it, on another disk")
    if lock := _lock_in(folder):
        raise InputError(f"bucket: {url} {is_a_store(lock)}")


def is_a_store(lock: str) -> str:
    """What is wrong with a directory that has this file."""
    return f"is a store, with {lock}; give another directory, or remove that from a copy in which nobody trains"


def _lies_in(one: Path, other: Path) -> bool:
    one, other = (Path(os.path.realpath(each)) for each in (one, other))
    return one.is_relative_to(other) or any(_are_same(each, other) for each in (one, *one.parents))


def _are_same(one: Path, other: Path) -> bool:
    try:
        return same(one.stat(), other.stat())
    except OSError:
        return False


def _lock_in(folder: Path) -> str:
    """Of a store, or of the first rank's that has one; "" where there is none."""
    try:
        names = sorted(os.listdir(folder))  # noqa: PTH208 (only the names)
    except OSError:  # which is told where it is asked for its objects
        return ""
    locks = (LOCK, *(f"{name}/{LOCK}" for name in names if parse_directory(name) is not None))
    return next((lock for lock in locks if os.path.lexists(folder / lock)), "")
