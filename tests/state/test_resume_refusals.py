"""What cannot be saved is refused at attach, what does not match is refused before anything changed; both by name."""

from __future__ import annotations

import json
from collections.abc import Callable

import pytest
import torch
from resume_memory import Saved, host_state, load, save
from safetensors.torch import load as load_safetensors
from test_resume_equality import advance, final, seed
from torch import nn
from torch.optim import lr_scheduler as lrs
from torch.utils.data import DataLoader, TensorDataset
from trainings_to_resume import TRAININGS, Tied

from checkflow.data import ResumableLoader
from checkflow.errors import CheckflowError, FormatError, InputError
from checkflow.state.host.capture import check_capturable
from checkflow.state.host.objects import HostObjects
from checkflow.state.host.record import parse_record
from checkflow.state.restore.files import parse_file
from checkflow.training import Training


class Net(nn.Module):
    """One layer of a chosen width and dtype, and whatever else is asked for."""

    def __init__(self, width: int = 3, dtype: torch.dtype = torch.float32, *, extra: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(2, width, dtype=dtype)
        self.other = nn.Linear(2, width, dtype=dtype)
        if extra:
            self.more = nn.Linear(1, 1)


class Fewer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(2, 3)


class TiedNet(Net):
    def __init__(self) -> None:
        super().__init__()
        self.other.weight = self.fc.weight


def training(model: nn.Module, **options: object) -> tuple[Training, HostObjects]:
    optimizer = torch.optim.AdamW(model.parameters())
    return Training(model, optimizer, lambda: None), HostObjects.of(**options)  # type: ignore[arg-type]


def step(made: tuple[Training, HostObjects]) -> tuple[Training, HostObjects]:
    for model in made[0].models:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
    for optimizer in made[0].optimizers:
        optimizer.step()
    return made


def base() -> tuple[Training, HostObjects]:
    made = training(Net())
    scheduler = lrs.StepLR(made[0].optimizers[0], 2)
    loader = ResumableLoader(TensorDataset(torch.arange(6)), 2)
    return made[0], HostObjects.of(scheduler=scheduler, loader=loader, generators={"own": torch.Generator()})


def with_objects(model: nn.Module, change: Callable[[Training], dict[str, object]]) -> tuple[Training, HostObjects]:
    made = Training(model, torch.optim.AdamW(model.parameters()), lambda: None)
    options: dict[str, object] = {
        "scheduler": lrs.StepLR(made.optimizers[0], 2),
        "loader": ResumableLoader(TensorDataset(torch.arange(6)), 2),
        "generators": {"own": torch.Generator()},
    } | change(made)
    return made, HostObjects.of(**options)  # type: ignore[arg-type]


def other_optimizer(make: Callable[[nn.Module], torch.optim.Optimizer]) -> tuple[Training, HostObjects]:
    model = Net()
    made = Training(model, make(model), lambda: None)
    return made, HostObjects.of(
        scheduler=lrs.StepLR(made.optimizers[0], 2),
        loader=ResumableLoader(TensorDataset(torch.arange(6)), 2),
        generators={"own": torch.Generator()},
    )


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    assert isinstance(model, Net)
    optimizer = torch.optim.AdamW(model.fc.parameters())
    optimizer.add_param_group({"params": list(model.other.parameters())})
    return optimizer


def no_group(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters())
    optimizer.param_groups.clear()
    return optimizer


def two_models() -> tuple[Training, HostObjects]:
    one, two = Net(), Net()
    optimizer = torch.optim.AdamW(one.parameters())
    return Training([one, two], optimizer, lambda: None), base()[1]


def none(_: Training) -> dict[str, object]:
    return {}


MISMATCHES: dict[str, tuple[Callable[[], tuple[Training, HostObjects]], str]] = {
    "shape": (lambda: with_objects(Net(4), none), r"model/fc\.weight: has shape \(4, 2\), \(3, 2\) in the checkpoint"),
    "dtype": (
        lambda: with_objects(Net(dtype=torch.float64), none),
        r"model/fc\.weight: has dtype torch\.float64, torch",
    ),
    "more here": (lambda: with_objects(Net(extra=True), none), r"model/more\.weight: is in this model, but not in the"),
    "more there": (lambda: with_objects(Fewer(), none), r"model/other\.bias: is in the checkpoint, but not in this"),
    "tied here": (lambda: with_objects(TiedNet(), none), r"model/other\.weight: is tied to model/fc\.weight here, but"),
    "models": (two_models, r"model: is in the checkpoint, but no such model is attached"),
    "optimizer": (
        lambda: other_optimizer(lambda m: torch.optim.Adam(m.parameters())),
        r"optimizer: is Adam, AdamW in the checkpoint",
    ),
    "groups": (lambda: other_optimizer(two_groups), r"optimizer: has 2 param_groups, 1 in the checkpoint"),
    "fewer groups": (
        lambda: other_optimizer(no_group),
        r"optimizer: has 0 param_groups, 1 in the checkpoint; add those that the training had by then, and call",
    ),
    "order": (
        lambda: other_optimizer(lambda m: torch.optim.AdamW(list(m.parameters())[::-1])),
        r"optimizer\.param_groups\[0\]: parameter 0 is model/other\.bias, model/fc\.weight in the checkpoint",
    ),
    "fewer": (
        lambda: other_optimizer(lambda m: torch.optim.AdamW(list(m.parameters())[:3])),
        r"optimizer\.param_groups\[0\]: has 3 parameters, 4 in the checkpoint",
    ),
    "no scheduler": (
        lambda: with_objects(Net(), lambda _: {"scheduler": None}),
        r"scheduler: is in the checkpoint, but no such object is attached",
    ),
    "scaler": (
        lambda: with_objects(Net(), lambda _: {"scaler": torch.amp.GradScaler("cpu")}),
        r"scaler: is attached, but the checkpoint has no such object",
    ),
    "scheduler": (
        lambda: with_objects(Net(), lambda t: {"scheduler": lrs.ExponentialLR(t.optimizers[0], 0.9)}),
        r"scheduler: is ExponentialLR, StepLR in the checkpoint",
    ),
    "generators": (
        lambda: with_objects(Net(), lambda _: {"generators": {"mine": torch.Generator()}}),
        r"^generator\.mine: is in this run, not in the checkpoint",
    ),
    "data": (
        lambda: with_objects(Net(), lambda _: {"loader": ResumableLoader(TensorDataset(torch.arange(7)), 2)}),
        r"^loader: size is 7, 6 in the checkpoint",
    ),
}


@pytest.mark.parametrize("name", MISMATCHES)
def test_a_mismatch_is_refused_before_anything_is_changed(name: str) -> None:
    """One difference at a time, named; tensors, optimizer, objects and generators stay as they were."""
    saved = save(*step(base()), 1)
    make, message = MISMATCHES[name]
    made, objects = step(make())
    seed(5)
    before = _everything(made, objects)
    with pytest.raises(InputError, match=message):
        load(saved, made, objects)
    assert _everything(made, objects) == before


def _everything(made: Training, objects: HostObjects) -> str:
    """The record and the tensors."""
    saved = save(made, objects, 0)
    return saved.record.decode() + repr({name: bytes(data) for name, data in saved.files.items()})


def test_tied_there_but_not_here_is_refused() -> None:
    """Training would diverge from then on."""
    saved = save(*training(TiedNet()), 0)
    with pytest.raises(InputError, match=r"model/other\.weight: is tied to model/fc\.weight only in the checkpoint"):
        load(saved, *training(Net()))


def test_optimizer_state_of_another_shape_is_refused() -> None:
    """Where the live optimizer has state already."""
    saved = save(*step(training(Net())), 1)
    made, objects = step(training(Net()))
    made.optimizers[0].state[next(made.models[0].parameters())]["exp_avg"] = torch.zeros(2)
    with pytest.raises(InputError, match=r"state of model/fc\.weight: exp_avg is float32\[2\], float32\[3, 2\] in the"):
        load(saved, made, objects)


class Opaque:
    """An object with the protocol whose state cannot be saved."""

    def state_dict(self) -> dict[str, object]:
        return {"handles": [open]}

    def load_state_dict(self, _: dict[str, object], /) -> None:
        raise AssertionError


def test_what_cannot_be_saved_is_refused_at_attach() -> None:
    """Loader, scheduler, hyperparameters, metadata, extra state, optimizer state: each by its path."""
    cases: list[tuple[Callable[[], tuple[Training, HostObjects]], str]] = [
        (lambda: training(Net(), loader=Opaque()), r"loader\.handles\[0\]: a function cannot be saved"),
        (lambda: training(Net(), scheduler=[Opaque(), Opaque()]), r"scheduler\.0\.handles\[0\]"),
        (lambda: training(Net(), metadata={"when": object()}), r"metadata\.when: a object cannot be saved"),
    ]
    for make, message in cases:
        with pytest.raises(InputError, match=message):
            check_capturable(host_state(*make()))
    made, objects = training(Net())
    made.optimizers[0].param_groups[0]["hook"] = lambda: None
    with pytest.raises(InputError, match=r"optimizer\.param_groups\[0\]\.hook: a function cannot be saved"):
        check_capturable(host_state(made, objects))
    made, objects = step(training(Net()))
    made.optimizers[0].state[next(made.models[0].parameters())]["closure"] = print
    with pytest.raises(InputError, match=r"optimizer\.state of model/fc\.weight: closure: a function cannot be saved"):
        check_capturable(host_state(made, objects))
    made, objects = step(training(Net()))
    made.optimizers[0].state[torch.zeros(2)] = {}
    with pytest.raises(InputError, match=r"optimizer\.state: a tensor of shape \(2,\) is no parameter"):
        check_capturable(host_state(made, objects))


@pytest.mark.filterwarnings("ignore")
def test_a_loader_that_fabric_set_up_is_refused() -> None:
    """Also one that was given with a position, which what Fabric makes of it has not."""
    fabric = pytest.importorskip("lightning.fabric").Fabric(accelerator="cpu", devices=1)
    given = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader(torch.randn(4, 2), batch_size=2)
    with pytest.raises(InputError, match=r"loader: was set up by Fabric, and gives no state; leave it out of setup_"):
        HostObjects.of(loader=fabric.setup_dataloaders(given))


def test_attached_objects_need_the_protocol() -> None:
    """A plain DataLoader is told what to use; anything else, what it lacks."""
    with pytest.raises(InputError, match="a plain DataLoader does not know its position"):
        HostObjects.of(loader=DataLoader(TensorDataset(torch.arange(3))))
    with pytest.raises(InputError, match="loader: an iterator without state_dict"):
        HostObjects.of(loader=iter([1]))
    with pytest.raises(InputError, match=r"scheduler\.1: a int without state_dict"):
        HostObjects.of(scheduler=[Opaque(), 3])
    with pytest.raises(InputError, match=r"generator\.g: is a int"):
        HostObjects.of(generators={"g": 3})  # type: ignore[dict-item]


def test_the_files_are_plain_safetensors_and_the_record_is_json() -> None:
    """safetensors reads every tensor; tied names are in the metadata; the record names files and iteration."""
    run = TRAININGS["tied"]()
    advance(run, 1)
    saved = save(run.training, run.objects, 1)
    tensors = load_safetensors(bytes(saved.files["model.safetensors"]))
    assert "embed.weight" in tensors and "out.weight" not in tensors and "scratch" not in tensors
    assert parse_file("model.safetensors", saved.files["model.safetensors"]).aliases == {"out.weight": "embed.weight"}
    record = json.loads(saved.record)
    assert record["iteration"] == 1 and record["metadata"] == {"run": "test"}
    assert [part["file"] for part in record["models"]] == ["model.safetensors"]
    assert record["optimizers"][0]["file"] == "optimizer.safetensors"


def test_metadata_is_given_back() -> None:
    """The user's own JSON, as it was at the checkpoint, and the fingerprints."""
    notes: dict[str, object] = {"epoch": 1}
    made = training(Net(), metadata=notes)
    state = host_state(*made)
    first = state.capture(0).record()
    notes["epoch"] = 2
    saved = Saved(save(*made, 0).files, state.capture(0).record())
    restored = load(saved, *training(Net()))
    assert (restored.metadata, restored.fingerprints) == ({"epoch": 2}, {"schedule": "sha256:0"})
    assert json.loads(first)["metadata"] == {"epoch": 1}


def test_a_record_that_was_tampered_with_is_refused() -> None:
    """Every field removed in turn, and values of other types: an error of ours or the same as before, nothing else."""
    run = TRAININGS["several"]()
    advance(run, 2)
    saved = save(run.training, run.objects, 2)
    document = json.loads(saved.record)
    refused = 0
    for changed in _changes(document):
        other = TRAININGS["several"]()
        try:
            load(Saved(saved.files, json.dumps(changed).encode()), other.training, other.objects)
        except CheckflowError as error:
            assert len(str(error).splitlines()) == 1
            refused += 1
    assert refused > 150


def _changes(value: object) -> list[object]:
    """The document with one part removed or replaced, at every place."""
    found: list[object] = []
    if isinstance(value, dict):
        for key, item in value.items():
            found.append({other: kept for other, kept in value.items() if other != key})
            found += [value | {key: changed} for changed in (None, -1, *_changes(item))]
    elif isinstance(value, list):
        for index, item in enumerate(value[:2]):
            found.append(value[:index] + value[index + 1 :])
            found += [[*value[:index], changed, *value[index + 1 :]] for changed in _changes(item)]
    return found


@pytest.mark.parametrize("cut", [0, 7, 8, 100, 4095, 4096, 5000])
def test_a_file_cut_short_is_refused(cut: int) -> None:
    """The hashes would not match either; the reader does not rely on that."""
    saved = save(*training(Tied()), 0)
    with pytest.raises(FormatError, match=r"^model\.safetensors: "):
        parse_file(
            "model.safetensors", saved.files["model.safetensors"][:cut][: len(saved.files["model.safetensors"]) - 1]
        )


@pytest.mark.parametrize(
    "header",
    [
        b"[]",
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F99","shape":[2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[-2],"data_offsets":[0,8]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"b":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}}',
        b'{"a":{"dtype":"F32","shape":[1],"data_offsets":[0,4]}}',
        b'{"a":{"dtype":"F32","shape":[1000000000000],"data_offsets":[0,4000000000000]}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8],"more":1}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"b":"c"}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"__metadata__":{"b":1}}',
        b'{"a":{"dtype":"F32","shape":[2],"data_offsets":[0,8]},"a":1}',
        b"\xff",
    ],
)
def test_a_header_that_lies_is_refused(header: bytes) -> None:
    """Sizes, offsets, dtypes, ties and keys are checked against the eight bytes that follow."""
    data = memoryview(len(header).to_bytes(8, "little") + header + bytes(8))
    with pytest.raises(FormatError, match=r"^f: "):
        parse_file("f", data)


@pytest.mark.parametrize("record", [b"", b"[]", b'{"format":"other"}', b'{"format":"checkflow-record","version":2}'])
def test_what_is_no_record_is_refused(record: bytes) -> None:
    """Empty, another format, another version."""
    with pytest.raises(FormatError, match=r"^commit\.json: "):
        parse_record(record)


def test_implementation_flags_stay_as_the_new_optimizer_has_them() -> None:
    """foreach and fused choose how an update is computed: looped state goes on under foreach, to the same bits."""
    seed(1)
    run = TRAININGS["adamw looped"]()
    advance(run, 2)
    saved = save(run.training, run.objects, 2)
    other = TRAININGS["adamw foreach"]()
    load(saved, other.training, other.objects)
    assert other.training.optimizers[0].param_groups[0]["foreach"] is True
    advance(run, 1)
    expected = final(run)
    load(saved, other.training, other.objects)
    advance(other, 1)
    found = final(other)
    for key in found.keys() - {"groups 0", "seen"}:
        assert found[key] == expected[key], key
