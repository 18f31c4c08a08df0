"""A loop of Accelerate's, killed anywhere and resumed, ends as one that was never interrupted, to the bit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from lives import WHOLE, check_ranks, order, run, statuses, told
from once import once

pytest.importorskip("accelerate", reason="accelerate is not installed: pip install 'checkflow[accelerate]'")
pytest.importorskip("torchdata")

HERE = Path(__file__).parent
BATCH = 2

# Where it is killed, and the iteration that it resumes from. 4 iterations are an epoch.
KILLS = {
    "batch:6": 6,  # within an epoch, as iteration 7 begins
    "batch:1": 1,
    "update:6": 6,  # updated, and not yet an iteration
    "accumulation:6": 6,  # between its micro-batches
    "border:4": 4,  # the epoch's last iteration has ended
    "evaluation:8": 8,  # which is repeated
}
KINDS = (
    "shuffled",
    "shuffled-stateful",
    "shuffled-seedable-stateful",
    "sequential-stateful",
    "generator",
    "bucketed",
    "workers",
    "workers-stateful",
    "shuffled-stateful-unlisted",
    "persistent-unlisted",
)
MANY = "shuffled-seedable"
CASES = [f"{MANY}:{kill}" for kill in KILLS] + [f"{kind}:batch:6" for kind in KINDS]
CASES += ["shuffled:border:8", "shuffled-stateful:border:8", "persistent-unlisted:border:8"]
UNLIKE = "workers-stateful"  # whose order was drawn by workers before it is attached, and is drawn again


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [f"{kind}:{when}:0" for kind in (MANY, *KINDS) for when in WHOLE] + CASES
    return once(tmp_path_factory, "accelerate", lambda folder: run(HERE / "accelerate_loops.py", folder, *cases))


@pytest.mark.parametrize("kind", [kind for kind in (MANY, *KINDS) if kind != UNLIKE])
def test_checkpoints_change_nothing(root: Path, kind: str) -> None:
    assert told(root, f"{kind}:never:0") == told(root, f"{kind}:plain:0")
    assert order(root, f"{kind}:never:0") == order(root, f"{kind}:plain:0")


@pytest.mark.parametrize("case", CASES)
def test_killed_and_resumed_it_ends_the_same(root: Path, case: str) -> None:
    """Weights, optimizer, scheduler, generators, history, Accelerate's counts, and the data, with what is drawn."""
    whole = f"{case.split(':')[0]}:never:0"
    assert statuses(root, case) == [-9, 0]
    assert told(root, case) == told(root, whole)
    assert order(root, case) == order(root, whole)


# Of 2 ranks: 2 iterations are an epoch.
RANKS = [f"shuffled:{kill}" for kill in ("batch:3", "update:3", "accumulation:3", "border:2", "evaluation:4")]
RANKS += [f"{kind}:batch:3" for kind in ("shuffled-seedable", "shuffled-seedable-stateful", "generator", "workers")]
RANKS += [f"shuffled-fsdp:{kill}" for kill in ("batch:3", "evaluation:4")]


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = dict.fromkeys(case.split(":")[0] for case in RANKS)
    cases = [f"{kind}:{when}:0" for kind in kinds for when in WHOLE] + RANKS
    return once(
        tmp_path_factory, "accelerate-ranks", lambda folder: run(HERE / "accelerate_loops.py", folder, *cases, ranks=2)
    )


@pytest.mark.parametrize("case", RANKS)
def test_killed_ranks_end_as_those_that_were_not(of_ranks: Path, case: str) -> None:
    """With the plain DistributedDataParallel, or FSDP2, that Accelerate wraps the model in."""
    check_ranks(of_ranks, case)


@pytest.mark.parametrize("kind", dict.fromkeys(case.split(":")[0] for case in RANKS))
def test_checkpoints_change_nothing_of_ranks(of_ranks: Path, kind: str) -> None:
    for rank in "01":
        assert told(of_ranks, f"{kind}:never:0/{rank}") == told(of_ranks, f"{kind}:plain:0/{rank}")


def test_one_batch_is_loaded_again(root: Path) -> None:
    """Beside the one that was in hand, and the one that Accelerate had fetched ahead."""
    loaded, whole = ((root / f"{MANY}:{end}" / "loaded").read_text().split() for end in ("batch:6", "never:0"))
    assert len(loaded) == len(whole) + 3 * BATCH


REFUSED = """
import json, sys, types, torch, checkflow
from pathlib import Path
from accelerate_loops import *
folder = Path(sys.argv[1])
class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        yield from torch.randn(4, 4)
def life(name, **options):
    return Life(folder / name, "shuffled", **({"seedable": False, "stateful": False} | options))
def attached(one, **options):
    given = {"loader": one.loader} | options
    return attach(one.accelerator, one.model, one.optimizer, store=one.folder / "store", **given)
def prepared():
    one = life("a")
    checkflow.attach(one.model, one.optimizer, store=one.folder / "store", loader=one.loader)
def deepspeed():
    one = life("b")
    one.accelerator = types.SimpleNamespace(distributed_type=DistributedType.DEEPSPEED)
    attached(one)
def scaler():
    attached(life("c"), scaler=1)
def extra():
    attached(life("d"), extra={"accelerate": {}})
def iterable():
    one = life("e")
    attached(one, loader=one.accelerator.prepare(DataLoader(Stream(), 2)))
def accumulating():
    one = life("f")
    with attached(one) as ckpt, one.accelerator.accumulate(one.model):
        ckpt.step()
def sampler():
    with attached(life("g")) as ckpt:
        ckpt.step()
    with attached(life("g", seedable=True)) as ckpt:
        ckpt.restore()
def shorter():
    one = life("h")
    with attached(one) as ckpt:
        for batch in one.loader:
            ckpt.step()
            if ckpt.status().staged == 9: break
    one = life("h")
    one.loader = one.accelerator.prepare(DataLoader(torch.randn(10, 4), 2))
    with attached(one) as ckpt:
        ckpt.restore()
        for batch in one.loader:
            pass
def registered():
    one = life("i")
    with attached(one) as ckpt:
        one.accelerator.register_for_checkpointing(one.scheduler.scheduler)
        ckpt.step()
def late():
    one = life("j")
    with attached(one) as ckpt:
        one.accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(torch.optim.SGD(one.model.parameters(), 1.0)))
        ckpt.step()  # another's
        one.accelerator.prepare(torch.optim.lr_scheduler.ConstantLR(one.optimizer.optimizer))
        ckpt.step()
said = {}
cases = (prepared, deepspeed, scaler, extra, iterable, sampler, shorter, registered, late, accumulating)
for case in cases:  # the last leaves it so
    try:
        case()
    except Exception as error:
        said[case.__name__] = f"{type(error).__name__}: {error}"
print(json.dumps(said))
"""
SAYS = {
    "prepared": "loader: was prepared by Accelerate, and its state is no position; attach with "
    "checkflow.integrations.accelerate",
    "deepspeed": "accelerator: DEEPSPEED is not supported; use DistributedDataParallel or FSDP2",
    "scaler": "scaler: is the Accelerator's own, and taken along; leave it out",
    "extra": "extra: 'accelerate' is what the Accelerator keeps; take another name",
    "iterable": "loader: a prepared loader without a batch sampler has no positions; leave torchdata's "
    "StatefulDataLoader out of prepare(), or give the dataset a length",
    "accumulating": "step: gradients are being accumulated; call it where accelerator.sync_gradients",
    "registered": "register_for_checkpointing: was called after attach(), and no checkpoint has what it was given; "
    "call it before",
    "late": "prepare: was given a scheduler after attach(), and no checkpoint has it; call it before, and "
    "attach(scheduler=...) what it gives",
    "sampler": "loader: use_seedable_sampler differs from the checkpoint's; prepare it as it was",
    "shorter": "loader: has 5 batches, 11 in the checkpoint; use the same data",
}


def test_what_is_refused(tmp_path: Path) -> None:
    """In one line, which says what to do."""
    done = subprocess.run([sys.executable, "-c", REFUSED, str(tmp_path)], cwd=HERE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout) == {case: f"InputError: {line}" for case, line in SAYS.items()}


OF_RANKS = {
    "fsdp1": ("model: FSDP is not supported yet; use FSDP2 (fully_shard), DistributedDataParallel, or one process",)
    * 2,
    "dispatched": (
        "loader: gets its batches from the first process, and has no position on the others; prepare it without "
        "dispatch_batches",
    )
    * 2,
    "attaches": (
        "attach(): rank 1 has not come to it within 0.5 s; call it on every rank, and see whether all run",
        "",
    ),
    "restores": (
        "restore(): rank 1 has not come to it within 0.5 s; call it on every rank, and see whether all run",
        "",
    ),
}


@pytest.fixture(scope="module")
def misused(tmp_path_factory: pytest.TempPathFactory) -> Path:
    cases = [f"{kind}:never:0" for kind in OF_RANKS]
    return once(
        tmp_path_factory, "misused", lambda folder: run(HERE / "accelerate_misuses.py", folder, *cases, ranks=2)
    )


@pytest.mark.parametrize("kind", OF_RANKS)
def test_what_is_refused_of_ranks(misused: Path, kind: str) -> None:
    """In one line on each that does it; nobody waits for good."""
    said = [told(misused, f"{kind}:never:0/{rank}") for rank in range(2)]
    for line, expected in zip(said, OF_RANKS[kind], strict=True):
        assert line.removeprefix("rank 0: ").removeprefix("rank 1: ") == expected


KEPT = """
import sys, torch
from pathlib import Path
from accelerate_loops import *
folder = Path(sys.argv[1])
class Best:
    value = 0
    def state_dict(self): return {"value": self.value}
    def load_state_dict(self, state): self.value = state["value"]
for life in range(2):
    one, best = Life(folder, "shuffled", seedable=False, stateful=False), Best()
    one.accelerator.register_for_checkpointing(best)
    if life:
        one.accelerator.gradient_accumulation_steps = 4
    with attach(one.accelerator, one.model, one.optimizer, store=folder / "store") as ckpt:
        ckpt.restore()
        if not life:
            for _ in range(3):
                with one.accelerator.accumulate(one.model):
                    pass
            best.value = 7
            ckpt.step()
        print(best.value, one.accelerator.step)
"""


def test_what_the_accelerator_keeps_is_taken_along(tmp_path: Path) -> None:
    """Its count too, which another number of micro-batches is counted from."""
    done = subprocess.run([sys.executable, "-c", KEPT, str(tmp_path)], cwd=HERE, capture_output=True, text=True)
    assert done.stdout.splitlines() == ["7 3", "7 3"], done.stderr


def test_a_pass_that_was_left_begins_anew(tmp_path: Path) -> None:
    """As without checkflow; also in a run that resumes after it was left."""
    program = """
import sys
from pathlib import Path
from accelerate_loops import *
folder = Path(sys.argv[1])
for life in range(2):
    one = Life(folder, "sequential", seedable=False, stateful=False)
    loaders = [one.loader, one.evaluated]
    with attach(one.accelerator, one.model, one.optimizer, loader=loaders, store=folder / "store") as ckpt:
        ckpt.restore()
        given = 0
        for batch in one.loader:
            given += 1
            for _ in one.evaluated:
                break
            ckpt.step()
            if given == 4 and not life:
                os._exit(0)
    print(given, sum(1 for _ in one.evaluated))
"""
    for expected in ("", "7 3"):
        done = subprocess.run([sys.executable, "-c", program, str(tmp_path)], cwd=HERE, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert done.stdout.strip() == expected
        program = program.replace("range(2)", "[1]")


def test_the_example_goes_on_where_it_was(tmp_path: Path) -> None:
    """Killed by the one who reads what it prints, it is run again: each iteration as in a run that was not."""
    example = [sys.executable, str(HERE.parent.parent / "examples" / "accelerate_loop.py")]
    (tmp_path / "whole").mkdir()
    whole = subprocess.run(example, cwd=tmp_path / "whole", check=True, capture_output=True, text=True).stdout
    with subprocess.Popen(example, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as life:
        assert life.stdout is not None
        printed = 0
        for line in life.stdout:  # some more until the kill has arrived
            printed += 1
            if "iteration 6," in line:
                life.kill()
    again = subprocess.run(example, cwd=tmp_path, check=True, capture_output=True, text=True)
    lines = again.stdout.splitlines()
    assert 12 - len(lines) in (printed - 1, printed), again.stderr
    assert lines == whole.splitlines()[12 - len(lines) :]


def test_an_older_one_is_told_in_a_line(tmp_path: Path) -> None:
    (tmp_path / "accelerate-1.8.1.dist-info").mkdir()
    (tmp_path / "accelerate-1.8.1.dist-info" / "METADATA").write_text("Name: accelerate\nVersion: 1.8.1\n")
    there = os.pathsep.join([str(tmp_path), str(HERE.parent.parent)])
    command = [sys.executable, "-c", "import checkflow.integrations.accelerate"]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"PYTHONPATH": there})
    assert done.stderr.splitlines()[-1] == (
        "ImportError: checkflow.integrations.accelerate needs accelerate >= 1.9, this is 1.8.1; "
        "pip install 'checkflow[accelerate]'"
    )
