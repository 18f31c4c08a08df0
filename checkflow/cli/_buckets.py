"""What the commands on stores do where they are given the URL of a bucket."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping, Set
from contextlib import contextmanager
from pathlib import Path

from checkflow.cli import _console
from checkflow.errors import CorruptStoreError, InputError, StoreError
from checkflow.jsonfile import folder_beside
from checkflow.store.bucket.download import compare, download
from checkflow.store.bucket.names import BucketContents, by_rank, has_ranks, iteration_of
from checkflow.store.bucket.objects import BucketError, Objects
from checkflow.store.format.ranks import directory_of


def is_url(store: str) -> bool:
    """Whether it is a bucket's, and no path."""
    return "://" in store


@contextmanager
def opened(url: str) -> Iterator[Objects]:
    """Its objects. Raises StoreError where they cannot be read, InputError for what is no URL of a bucket."""
    objects = Objects.open(url)
    try:
        objects.check_there()
        yield objects
    except BucketError as error:
        raise StoreError(f"{url}: cannot be read ({error}); {objects.remedy(error)}") from None


def compared(url: str, progress: Callable[[str], None]) -> tuple[dict[str, str | None], list[int] | None]:
    """By the name of each checkpoint, of which every byte is read, what is wrong with it; None where nothing is.

    And of several processes the iterations, newest first, of which each has a part that verifies. Raises StoreError.
    """
    found: dict[str, str | None] = {}
    with opened(url) as objects:
        sizes = objects.sizes()
        for (rank, processes), contents in by_rank(sizes).items():
            own = objects if processes == 1 else objects.below(directory_of(rank, processes))
            for name in contents.newest_first:
                known = str(_place(rank, processes) / name)
                progress(f"reading {known}")
                try:
                    compare(own, name, contents.checkpoints[name])
                    found[known] = None
                except CorruptStoreError as error:
                    found[known] = str(error)
        verified = {name for name, wrong in found.items() if wrong is None}
        return found, _whole(objects, sizes, verified) if verified and has_ranks(sizes) else None


def _whole(objects: Objects, sizes: Mapping[str, int], verified: Set[str]) -> list[int]:
    from checkflow.distributed.stored import parts_in  # which needs torch

    return [
        each.mark.iteration
        for each in parts_in(objects, sizes, lambda _: None)
        if each.is_whole
        and all(str(_place(rank, each.processes) / part.name) in verified for rank, part in each.ranks.items())
    ]


def _place(rank: int, processes: int) -> Path:
    """Of a rank's checkpoints, in a store and below a URL."""
    return Path() if processes == 1 else Path(directory_of(rank, processes))


@contextmanager
def fetched(url: str, iteration: int | None, output: Path, progress: Callable[[str], None]) -> Iterator[Path]:
    """A store on disk of the newest checkpoint (of that iteration, if given) that is in the bucket as it was written.

    It lies beside the output, and only until this ends. Raises StoreError and CorruptStoreError where there is none,
    InputError where it cannot be written.
    """
    with _writing_beside(output):
        folder = folder_beside(output)
    with folder as name:
        with _writing_beside(output), opened(url) as objects:
            sizes = objects.sizes()
            (_fetch_parts if has_ranks(sizes) else _fetch)(objects, sizes, iteration, Path(name), progress)
        yield Path(name)


@contextmanager
def _writing_beside(output: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        why = error.strerror or error
        raise InputError(f"--output {output}: what is fetched cannot be written beside it ({why})") from None


def _fetch(
    objects: Objects, sizes: Mapping[str, int], iteration: int | None, store: Path, progress: Callable[[str], None]
) -> None:
    contents, wrong = BucketContents.of(sizes), ""
    wanted = [name for name in contents.newest_first if iteration in (None, iteration_of(name))]
    for name in wanted:
        progress(f"fetching {name}")
        try:
            download(objects, name, contents.checkpoints[name], store)
            return
        except CorruptStoreError as error:
            wrong = wrong or f"{name}: {error}"
            _console.tell(f"checkflow: skipped {name}: {error}")
    _refuse(objects.url, iteration, {iteration_of(name) for name in contents.newest_first}, wrong)


def _fetch_parts(
    objects: Objects, sizes: Mapping[str, int], iteration: int | None, store: Path, progress: Callable[[str], None]
) -> None:
    from checkflow.distributed.stored import parts_in  # which needs torch

    whole = [each for each in parts_in(objects, sizes, _console.tell) if each.is_whole]
    wrong = ""
    for each in (each for each in whole if iteration in (None, each.mark.iteration)):
        try:
            for rank, part in each.ranks.items():
                progress(f"fetching iteration {each.mark.iteration}, rank {rank}")
                into = store / _place(rank, each.processes)
                into.mkdir(exist_ok=True)
                download(part.objects, part.name, part.sizes, into)
            return
        except CorruptStoreError as error:
            wrong = wrong or f"iteration {each.mark.iteration}, rank {rank}: {error}"
            _console.tell(f"checkflow: skipped iteration {each.mark.iteration}, rank {rank}: {error}")
            for left in store.iterdir():
                shutil.rmtree(left)
    _refuse(objects.url, iteration, {each.mark.iteration for each in whole}, wrong)


def _refuse(url: str, iteration: int | None, there: set[int], wrong: str) -> None:
    if wrong:
        raise CorruptStoreError(f"{url}: no checkpoint verifies ({wrong}); take it from a store on disk")
    if not there:
        raise StoreError(f"{url}: no checkpoint yet; nothing to export")
    raise StoreError(f"{url}: has no checkpoint of iteration {iteration}; it has {', '.join(map(str, sorted(there)))}")
