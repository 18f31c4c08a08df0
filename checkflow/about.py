"""What a checkpoint says of the run that took it: code, configuration, data, epoch and machine.

All of it is for people and for a comparison after a resume; nothing that is restored depends on it.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, TypeAdapter

from checkflow import strictjson
from checkflow.counts import Whole
from checkflow.errors import InputError
from checkflow.jsonfile import digest_of
from checkflow.strictjson import Json

MAX_CONFIG_BYTES = 2**20  # it is in each checkpoint's record
_GIT_S = 10.0  # then it is done without
_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Git(BaseModel):
    """The commit that was checked out where the script lies; `dirty` if a tracked file was different."""

    model_config = _STRICT

    sha: str
    dirty: bool

    def __str__(self) -> str:
        return f"{self.sha[:12]}{' with changes' if self.dirty else ''}"


class About(BaseModel):
    """The part of a record that says where it comes from. None: not known, or not given."""

    model_config = _STRICT

    epoch: Whole | None = None  # as the loader counts them
    git: Git | None = None
    config: Json = None
    config_digest: str | None = None
    dataset: str | None = None
    host: str | None = None


_ABOUT = TypeAdapter(About)


def versions() -> dict[str, str]:
    """Of what the run is made of, without what torch and NumPy say of themselves."""
    return {"checkflow": importlib.metadata.version("checkflow"), "python": platform.python_version()}


class Run:
    """What is the same for all checkpoints of a run. git is asked in a thread: until it answered, nobody waits."""

    def __init__(self, config: object = None, dataset: str | None = None, folder: Path | None = None) -> None:
        if dataset is not None and not isinstance(dataset, str):
            raise InputError(f"dataset: is a {type(dataset).__name__}; give its identifier as text")
        self._about = About(
            config=_json(config), config_digest=None if config is None else digest_of(_json(config)), dataset=dataset,
            host=platform.node() or None,
        )  # fmt: skip
        self.git: Git | None = None  # so far
        self._thread = threading.Thread(
            target=self._ask, args=(folder or _script(),), daemon=True, name="checkflow-git"
        )
        self._thread.start()

    def about(self, epoch: int | None = None, wait_s: float = 0.0) -> About:
        """As far as it is known now."""
        if wait_s:
            self._thread.join(wait_s)
        return self._about.model_copy(update={"git": self.git, "epoch": epoch})

    def _ask(self, folder: Path) -> None:
        self.git = git_of(folder)


def git_of(folder: Path) -> Git | None:
    """None where there is no git, no repository, no commit yet, or no answer."""
    command = ["git", "-c", "core.fsmonitor=false", "status", "--porcelain=v2", "--branch", "--untracked-files=no"]
    try:
        said = subprocess.run(
            command, cwd=folder, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            timeout=_GIT_S, check=True, env=os.environ | {"GIT_OPTIONAL_LOCKS": "0"},
        ).stdout.decode(errors="replace").splitlines()  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    sha = next((line.split()[2] for line in said if line.startswith("# branch.oid ")), "(initial)")
    return None if sha == "(initial)" else Git(sha=sha, dirty=any(not line.startswith("#") for line in said))


def about_in(record: bytes) -> tuple[About, dict[str, str]]:
    """What a record says, and the versions. Raises ValueError for what no checkflow wrote."""
    document = strictjson.loads(record)
    if not isinstance(document, dict):
        raise ValueError("is no object")
    about = _ABOUT.validate_json(json.dumps(document.get("about") or {}), strict=True)
    named = document.get("versions")
    return about, {name: str(version) for name, version in named.items()} if isinstance(named, dict) else {}


def changes(then: About, now: About, before: Mapping[str, str], after: Mapping[str, str]) -> tuple[str, ...]:
    """What is not as it was, a few words each. What either run does not know is not compared."""
    return tuple(_changes(then, now, before, after))


def _changes(then: About, now: About, before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    if then.git and now.git and then.git != now.git:
        yield f"git {then.git} -> {now.git}"
    if then.config_digest and now.config_digest and then.config_digest != now.config_digest:
        yield f"config: {_differing(then.config, now.config)}"
    if then.dataset and now.dataset and then.dataset != now.dataset:
        yield f"dataset {then.dataset} -> {now.dataset}"
    yield from other_values(before, after)


def other_values(before: Mapping[str, str], after: Mapping[str, str]) -> Iterator[str]:
    """Of what has a name in both: "threads 8 -> 2"."""
    for name in sorted(before.keys() & after.keys()):
        if before[name] != after[name]:
            yield f"{name} {before[name]} -> {after[name]}"


def _differing(then: Json, now: Json) -> str:
    """ "lr 0.1 -> 0.2", of the first keys that differ."""
    if not isinstance(then, dict) or not isinstance(now, dict):
        return "is another"
    keys = [key for key in {**then, **now} if then.get(key) != now.get(key) or (key in then) != (key in now)]
    told = [f"{key} {_short(then, key)} -> {_short(now, key)}" for key in keys[:3]]
    return ", ".join(told) + (f" and {len(keys) - 3} more" if len(keys) > 3 else "")


def _short(config: Mapping[str, Json], key: str) -> str:
    return f"{json.dumps(config[key]):.40}" if key in config else "nothing"


def _json(config: object) -> Json:
    try:
        text = json.dumps(config, allow_nan=False)
        if len(text) > MAX_CONFIG_BYTES:
            raise InputError(f"config: is {len(text)} bytes of JSON, {MAX_CONFIG_BYTES} at most; give less of it")
        return strictjson.loads(text)
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"config: is no JSON ({error}); give dicts, lists, text and numbers") from None


def _script() -> Path:
    """The folder of the program that runs; the current one where there is none, and one of nobody's where it was
    removed."""
    file = getattr(sys.modules.get("__main__"), "__file__", None)
    try:
        return Path(file).resolve().parent if isinstance(file, str) else Path.cwd()
    except FileNotFoundError:
        return Path("/")
