"""What the commands on stores do where they are given the URL of a bucket."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from checkflow.cli import _console
from checkflow.errors import CorruptStoreError, InputError, StoreError
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
    try:
        yield Objects.open(url)
    except BucketError as error:
        raise StoreError(f"{url}: cannot be read ({error}); check its name, and the credentials") from None


def compared(url: str, progress: Callable[[str], None]) -> Iterator[tuple[str, str | None]]:
    """(name, what is wrong with it, if anything is) of each checkpoint, of which every byte is read.

    Raises StoreError.
    """
    with opened(url) as objects:
        for (rank, processes), contents in by_rank(objects.sizes()).items():
            own = objects if processes == 1 else objects.below(directory_of(rank, processes))
            before = "" if processes == 1 else f"{directory_of(rank, processes)}/"
            for name in contents.newest_first:
                progress(f"reading {before}{name}")
                try:
                    compare(own, name, contents.checkpoints[name])
                    yield f"{before}{name}", None
                except CorruptStoreError as error:
                    yield f"{before}{name}", str(error)


@contextmanager
def fetched(url: str, iteration: int | None, beside: Path, progress: Callable[[str], None]) -> Iterator[Path]:
    """A store on disk of the newest checkpoint (of that iteration, if given) that is in the bucket as it was written.

    It lies beside that path, and only until this ends. Raises StoreError and CorruptStoreError where there is none,
    InputError where it cannot be written.
    """
    folder = None
    try:
        try:
            folder = Path(tempfile.mkdtemp(prefix=f".{beside.name}.", dir=beside.parent))
            with opened(url) as objects:
                sizes = objects.sizes()
                (_fetch_parts if has_ranks(sizes) else _fetch)(objects, sizes, iteration, folder, progress)
        except OSError as error:
            why = error.strerror or error
            raise InputError(f"--output {beside}: no room beside it for what is in {url} ({why})") from None
        yield folder
    finally:
        if folder is not None:
            shutil.rmtree(folder, ignore_errors=True)


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

    whole = [each for each in parts_in(objects, sizes, _console.tell) if not each.missing]
    wrong = ""
    for each in (each for each in whole if iteration in (None, each.mark.iteration)):
        try:
            for rank, part in each.ranks.items():
                progress(f"fetching iteration {each.mark.iteration}, rank {rank}")
                into = store if each.processes == 1 else store / directory_of(rank, each.processes)
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
