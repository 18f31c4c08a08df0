"""What ranks agree on before they save, and what a reader asks of what they saved: a step at a time, without a job."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from saving import loaded, saved
from torch.distributed.checkpoint.planner import LoadPlan, SavePlan

import checkflow
from checkflow.cli import run
from checkflow.distributed.dcp_plans import record_of
from checkflow.distributed.marks import Mark
from checkflow.state.host.record import ChunkRecord, IndexRecord, MemberRecord, TensorRecord
from checkflow.store import alone
from checkflow.store.format.begun import NewFile

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def told(store: Path, iteration: int | None = None) -> SavePlan:
    """What a rank sends to its coordinator."""
    writer = checkflow.StoreWriter(store, iteration)
    writer.set_up_storage_writer(False)
    return writer.prepare_local_plan(SavePlan([]))


def agreed(store: Path, others: list[SavePlan], iteration: int | None = None) -> Mark:
    """By a coordinator that is told this by other ranks."""
    writer = checkflow.StoreWriter(store, iteration)
    writer.set_up_storage_writer(True)
    plans = [writer.prepare_local_plan(SavePlan([])), *others]
    marks = {plan.storage_data.mark for plan in writer.prepare_global_plan(plans)}
    (mark,) = marks
    assert isinstance(mark, Mark)
    return mark


def test_ranks_are_told_one_iteration(tmp_path: Path) -> None:
    with pytest.raises(checkflow.InputError, match="iteration: is 3 on one rank and 4 on another; give every rank"):
        agreed(tmp_path, [told(tmp_path, 3)], 4)
    assert agreed(tmp_path, [told(tmp_path, 3)], 3).iteration == 3


def test_what_a_rank_told_for_another_save_says_nothing_of_this_one(tmp_path: Path) -> None:
    """A planner that caches gives it to the coordinator again."""
    before = told(tmp_path, 3)
    assert agreed(tmp_path, [before], 3).iteration == 3
    assert agreed(tmp_path, [before], 7).iteration == 7
    assert agreed(tmp_path, [replace(before, usable=True)]).iteration == 1


def test_the_newest_that_any_rank_sees_counts(tmp_path: Path) -> None:
    """Each machine may have a disk of its own."""
    part(tmp_path / "1", 1, Mark(5, 50), None)
    mark = agreed(tmp_path / "0", [told(tmp_path / "1"), told(tmp_path / "2")])
    assert mark.iteration == 51 and mark.attempt > 5


def test_jobs_that_do_not_see_each_other_have_attempts_of_their_own(tmp_path: Path) -> None:
    assert len({agreed(tmp_path, [told(tmp_path)]).attempt for _ in range(5)}) == 5


def test_ranks_that_do_not_agree_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = checkflow.StoreWriter(tmp_path)
    writer.set_up_storage_writer(True, rank=0, use_collectives=False)
    monkeypatch.setattr("checkflow.distributed.dcp_writer.ranks_here", lambda: 2)
    writer.set_up_storage_writer(True, rank=0, use_collectives=True)
    with pytest.raises(checkflow.InputError, match="use_collectives=False: ranks have to agree"):
        writer.set_up_storage_writer(True, rank=0, use_collectives=False)


def part(
    store: Path, rank: int, mark: Mark, index: IndexRecord | None, files: Sequence[NewFile] = (), *, times: int = 1
) -> None:
    """A rank's, of two."""
    record = record_of(mark.iteration, MemberRecord(rank=rank, size=2, attempt=mark.attempt), {"n": rank}, index)
    for _ in range(times):
        alone.publish(alone.begin(store / f"rank-{rank}-of-2", files, print), mark.iteration, record, {}, print)


INDEX = IndexRecord(tensors={}, values={"n": 1}, planner=None)


def test_a_checkpoint_has_the_name_that_its_coordinator_gave_it(tmp_path: Path) -> None:
    part(tmp_path, 0, Mark(1, 4), None)
    part(tmp_path, 1, Mark(1, 4), INDEX, times=2)
    meta = checkflow.StoreReader(tmp_path).read_metadata().storage_meta
    assert meta is not None and meta.save_id == "00000002-iteration-4"


@pytest.mark.parametrize("how_many", [0, 2])
def test_one_record_says_what_is_where(how_many: int, tmp_path: Path) -> None:
    for rank in range(2):
        part(tmp_path, rank, Mark(1, 4), INDEX if how_many else None)
    metadata = checkflow.StoreReader(tmp_path).read_metadata()
    with pytest.raises(checkflow.CorruptStoreError, match=f"{how_many} of its records say what is where, not one"):
        _ = metadata.storage_data


def test_a_reader_that_is_given_another_store_forgets_the_one_before(tmp_path: Path) -> None:
    for name in "ab":
        saved(tmp_path / name, {"of": name})
    reader, other = (checkflow.StoreReader(tmp_path / name) for name in "ab")
    reader.read_metadata()
    reader.reset(tmp_path / "b")
    metadata = other.read_metadata()
    reader.set_up_storage_reader(metadata)
    assert reader.checkpoint_id == tmp_path / "b"
    saved(tmp_path / "b", {"of": "b, later"})
    other.read_metadata()
    assert reader.prepare_local_plan(LoadPlan([])) == other.prepare_local_plan(LoadPlan([]))


@pytest.mark.parametrize("rows", [3, 4], ids=["all of it", "not all of it"])
def test_parts_that_do_not_fill_a_tensor_are_not_exported(
    rows: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(tmp_path / "one", {"w": torch.ones(3)})
    (file,) = (tmp_path / "one").glob("0*/state.safetensors")
    data = memoryview(bytearray(file.read_bytes()))
    chunk = ChunkRecord(rank=0, tensor="w", offsets=(0,), sizes=(3,))
    index = IndexRecord(
        tensors={"w": TensorRecord(dtype="float32", shape=(rows,), chunks=(chunk,))}, values={}, planner=None
    )
    part(tmp_path / "two", 0, Mark(1, 4), index, [NewFile(file.name, len(data), [data])])
    part(tmp_path / "two", 1, Mark(1, 4), None)
    done = run(["export", str(tmp_path / "two"), "--to", "torch", "-o", str(tmp_path / "whole.pt")])
    assert (done == 0) == (rows == 3)
    assert ("parts do not fill 'w'" in capsys.readouterr().err) == (rows == 4)


def test_a_tensor_is_saved_as_it_reads_however_it_lies(tmp_path: Path) -> None:
    """Negative only when it is read, and contiguous, so that nothing copies it before; one element of several."""
    lazy = torch.complex(torch.zeros(1), torch.ones(1)).conj().imag
    assert lazy.is_neg() and lazy.is_contiguous()
    saved(tmp_path, {"lazy": lazy, "one": torch.arange(1.0, 5.0)[::4]})
    found = loaded(tmp_path, {"lazy": torch.zeros(1), "one": torch.zeros(1)})
    assert repr(found) == repr({"lazy": torch.tensor([-1.0]), "one": torch.ones(1)})
