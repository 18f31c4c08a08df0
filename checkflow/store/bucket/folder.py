"""A bucket that is a directory, by a URL: file:///path."""

from __future__ import annotations

import os
from pathlib import Path
from urllib.parse import unquote_to_bytes, urlsplit

from checkflow.errors import InputError


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
