"""A fit of Lightning's Trainer, killed anywhere and resumed, ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("lightning", reason="lightning is not installed: pip install 'checkflow[lightning]'")

import fits
import lightning.pytorch as pl
import torch
from lives import WHOLE, begun, check_ranks, order, plain, run, statuses, told
from once import once

from checkflow.errors import InputError
from checkflow.integrations.lightning import CheckflowCallback

# Where it is killed, and the step that it resumes from. 6 steps are an epoch; each fourth batch is validated.
KILLS = {
    "stateful:batch:4": 4,  # within an epoch, as step 5 begins
    "stateful:ended:4": 3,  # while callbacks are told that the batch ended: what belongs to the step may still come
    "stateful:validation:4": 3,  # the step and its validation are repeated
    "stateful:batch:9": 9,
    "stateful:epoch:6": 5,  # at the border, while callbacks are told that the epoch ends
    "stateful:next:6": 5,  # and that the next one begins
    "stateful:batch:6": 6,  # in the next one
    "stateful:next:12": 11,
    "stateful:raise:5": 5,
    "steps:batch:8": 8,  # a fit of so many steps
    "steps:next:6": 5,
    "generated:batch:8": 8,  # the loader has a generator of its own
    "generated:next:6": 5,
    "resumable:batch:8": 8,
    "resumable:next:6": 5,
    "paired:batch:4": 4,  # the shorter loader is in its second pass
    "streamed:batch:4": 4,  # Lightning holds a batch more than it gave
    "streamed:next:6": 5,
    "averaged:batch:8": 8,
    "stochastic:batch:8": 8,  # within the epoch in which averaging began
    "stopped:batch:1": 1,
    "stopped:validation:2": 1,  # which stops it within an epoch
    "stopped:epoch:2": 1,  # that epoch's end belongs to the step
    "growing:batch:13": 13,  # within the epoch from which on three batches are accumulated
    "counting:batch:8": 8,
    "found:batch:8": 8,  # a learning rate is looked for before each fit
    "manual:batch:7": 7,  # two optimizers, stepped by hand
    "manual:validation:6": 4,  # a batch in which both step is two global steps
}
KINDS = sorted({case.split(":")[0] for case in KILLS})
ENDED = [f"{kind}:ended:99" for kind in ("stateful", "resumable", "streamed", "stopped", "counting")]  # is not killed


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [*(f"{kind}:{when}:0" for kind in KINDS for when in WHOLE), *KILLS, *ENDED]
    return once(tmp_path_factory, "lightning", lambda folder: run(Path(fits.__file__), folder, *cases))


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_change_nothing(kind: str, root: Path) -> None:
    """Not even what validations and logs say."""
    whole = f"{kind}:plain:0"
    assert told(root, f"{kind}:never:0") == told(root, whole)
    assert order(root, f"{kind}:never:0") == order(root, whole)
    assert kind == "stopped" or len(order(root, whole)) > 2 * fits.ITEMS // fits.BATCH  # in each epoch


@pytest.mark.parametrize("case", KILLS)
def test_killed_and_resumed_it_ends_the_same(case: str, root: Path) -> None:
    """Weights, optimizers, schedulers, generators, all that was logged, the loops' counts, and the order of data."""
    assert statuses(root, case) == [1 if ":raise:" in case else -9, 0]
    assert told(root, case) == told(root, plain(case))
    assert order(root, case) == order(root, plain(case))


@pytest.mark.parametrize("case", KILLS)
def test_it_resumes_where_it_was_killed(case: str, root: Path) -> None:
    """No step that ended is taken again."""
    again = begun(root, case) - begun(root, plain(case))
    assert set(again) <= {str(KILLS[case] + 1)}


@pytest.mark.parametrize("case", ENDED)
def test_begun_again_after_its_end_it_leaves_the_same(case: str, root: Path) -> None:
    """What was logged last, too, which Lightning's sanity check drops, and generators, which loaders draw from."""
    assert statuses(root, case) == [0, 0]
    assert told(root, case) == told(root, plain(case))
    assert order(root, case) == order(root, plain(case))


# Of 2 ranks, by DDP and by FSDP2 (sharded): 3 steps are an epoch.
RANKS = [f"stateful:{kill}" for kill in ("batch:4", "validation:4", "next:3", "epoch:3", "raise:4")]
RANKS += [f"{kind}:batch:4" for kind in ("generated", "distributed", "divided", "manual", "sharded")]
RANKS += ["sharded:validation:4", "stopped:epoch:2"]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = dict.fromkeys(case.split(":")[0] for case in RANKS)
    cases = [f"{kind}:{when}:0" for kind in kinds for when in WHOLE] + RANKS
    return once(tmp_path_factory, "lightning-ranks", lambda folder: run(Path(fits.__file__), folder, *cases, ranks=2))


@pytest.mark.parametrize("case", RANKS)
def test_killed_ranks_end_as_those_that_were_not(case: str, of_ranks: Path) -> None:
    """Also where Lightning divides a sampler's order among them, which would begin with another one."""
    check_ranks(of_ranks, case)


@pytest.mark.parametrize("kind", dict.fromkeys(case.split(":")[0] for case in RANKS))
def test_checkpoints_change_nothing_of_ranks(kind: str, of_ranks: Path) -> None:
    for rank in "01":
        assert told(of_ranks, f"{kind}:never:0/{rank}") == told(of_ranks, f"{kind}:plain:0/{rank}")


def test_processes_that_lightning_starts(tmp_path: Path) -> None:
    """The first one starts the other by the same command; where that one is killed, the other ends, too."""
    launched = [sys.executable, str(Path(__file__).parent / "launched.py")]

    def ran(*given: str) -> tuple[list[str], str]:
        done = subprocess.run([*launched, *given], cwd=tmp_path, capture_output=True, text=True)
        return sorted(line for line in done.stdout.splitlines() if line.startswith("end")), done.stderr

    whole, _ = ran("whole")
    assert len(whole) == 2
    assert ran("killed", "0")[0] == []
    again, said = ran("killed")
    assert again == whole and "resumed iteration" in said, said


def test_under_its_older_name_it_is_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """pytorch_lightning, and no lightning beside it."""
    (tmp_path / "lightning.py").write_text("raise ImportError('no')")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(tmp_path), os.environ.get("PYTHONPATH")])))
    monkeypatch.setenv("FITS_NAMESPACE", "pytorch_lightning")
    cases = ["stateful:batch:4", "stateful:validation:4"]
    run(Path(fits.__file__), tmp_path, "stateful:plain:0", *cases)
    for case in cases:
        assert statuses(tmp_path, case) == [-9, 0]
        assert told(tmp_path, case) == told(tmp_path, "stateful:plain:0")


def fit(folder: Path, **options: Any) -> None:
    torch.set_num_threads(1)
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
        accelerator="cpu", callbacks=[CheckflowCallback(folder / "store", tell=lambda _: None, **options)],
    )  # fmt: skip
    folder.mkdir(exist_ok=True)
    loaders = (torch.utils.data.DataLoader(fits.data(), batch_size=11) for _ in range(2))
    trainer.fit(fits.Net(folder), *loaders)


@pytest.mark.filterwarnings("ignore")
def test_a_loader_without_a_position_is_told(tmp_path: Path) -> None:
    told = list[str]()
    fit(tmp_path, notify=told.append)
    assert any("a DataLoader does not know its position" in line for line in told), told


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", ["scheduler", "scaler"])
def test_what_is_the_trainer_s_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=f"{name}: is the Trainer's own"):
        fit(tmp_path, **{name: None})


def test_an_empty_store_is_not_the_working_directory() -> None:
    with pytest.raises(InputError, match="store: is empty; give a directory"):
        CheckflowCallback("")


@pytest.mark.filterwarnings("ignore")
def test_a_path_beside_the_store_is_refused(tmp_path: Path) -> None:
    trainer = pl.Trainer(
        max_epochs=1, logger=False, enable_progress_bar=False, enable_model_summary=False, accelerator="cpu",
        default_root_dir=tmp_path, callbacks=[CheckflowCallback(tmp_path / "store")],
    )  # fmt: skip
    module = fits.Net(tmp_path)
    trainer.strategy.connect(module)
    trainer.save_checkpoint(tmp_path / "other.ckpt")
    with pytest.raises(InputError, match="ckpt_path is given, and the store is what is resumed"):
        trainer.fit(module, fits.stateful(), ckpt_path=tmp_path / "other.ckpt")


def test_it_is_attached_when_the_fit_begins(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="is attached when the fit begins"):
        _ = CheckflowCallback(tmp_path).checkpointer


@pytest.mark.filterwarnings("ignore")
def test_loops_of_another_version_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkflow.integrations.lightning._WRAPPED", ("on_run_start", "gone"))
    with pytest.raises(InputError, match=r"lightning [\d.]+: its loops are others; use 2\.6"):
        fit(tmp_path)
