"""Sizes on fake tensors against real ones: of every operator's results, and of whole iterations at their peak."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from data_dependent import DATA_DEPENDENT
from torch import nn, optim
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_map
from trainings import FEATURES, loop

from checkflow import Training, models
from checkflow.trace import trace_training
from checkflow.trace.storages import Ledger
from checkflow.trace.workspaces import Workspaces
from checkflow.trace.writes import tensors_in

NETWORKS = ("alexnet", "bert", "gpt2", "llama_1b", "mnasnet", "resnet", "resnet3d", "transformer", "vgg", "vit")


class SizeChecker(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """While active, compares the bytes of every result with those that the same call has on fake tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.compared: set[str] = set()
        self.wrong: set[str] = set()

    def __torch_dispatch__(
        self,
        func: torch._ops.OpOverload,
        types: Sequence[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        storages = any(isinstance(value, torch.UntypedStorage) for value in args)
        fakes = None if storages or func.namespace != "aten" else _on_fakes(func, args, kwargs or {})
        result = func(*args, **(kwargs or {}))
        if fakes is not None:
            self.compared.add(str(func))
            if fakes != _allocated([*args, *(kwargs or {}).values()], result):
                self.wrong.add(str(func))
        return result


def _on_fakes(func: torch._ops.OpOverload, args: tuple[object, ...], kwargs: Mapping[str, object]) -> list[int] | None:
    """Bytes of the results on fake tensors; None where those need values."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)

    def convert(value: object) -> object:
        return mode.from_tensor(value.detach()) if isinstance(value, torch.Tensor) else value

    with _disable_current_modes():
        given, named = tree_map(convert, args), tree_map(convert, dict(kwargs))
        with mode:
            try:
                result = Workspaces(Ledger()).corrected(func, given, named, func(*given, **named))
            except (RuntimeError, NotImplementedError):
                return None
    return _allocated([*given, *named.values()], result)


def _allocated(given: object, result: object) -> list[int]:
    """Bytes of the results' storages; 0 for one that was given."""
    known = {tensor.untyped_storage()._cdata for tensor in tensors_in(given)}
    storages = [tensor.untyped_storage() for tensor in tensors_in(result)]
    return [0 if storage._cdata in known else storage.nbytes() for storage in storages]


@pytest.mark.parametrize("name", [*FEATURES, *DATA_DEPENDENT])
def test_every_result_of_a_feature_has_its_real_size(name: str) -> None:
    """Also where a kernel's workspace is one of the results."""
    with SizeChecker() as checker:
        training = (FEATURES | DATA_DEPENDENT)[name]()
        training.iteration()
    assert len(checker.compared) > 5
    assert not checker.wrong


@pytest.mark.parametrize("name", NETWORKS)
def test_every_result_of_a_network_has_its_real_size(name: str) -> None:
    """The same for the bundled networks."""
    training = partial(models.factory(name), batch_size=2, small=True)()
    with SizeChecker() as checker:
        training.iteration()
    assert len(checker.compared) > 5
    assert not checker.wrong


def _recurrent(kind: Callable[..., nn.RNNBase], *, outputs: int = 32, **options: object) -> Training:
    layer, head, x = (
        kind(16, 32, num_layers=2, batch_first=True, **options),
        nn.Linear(outputs, 4),
        torch.randn(3, 20, 16),
    )
    model, y = nn.ModuleList([layer, head]), torch.randint(0, 4, (60,))
    return loop(model, optim.SGD(model.parameters(), 0.1), lambda: F.cross_entropy(head(layer(x)[0]).flatten(0, 1), y))


def _pooled() -> Training:
    model = nn.Sequential(nn.Conv1d(3, 8, 3), nn.MaxPool1d(2), nn.ConvTranspose1d(8, 4, 3), nn.LPPool1d(2, 2))
    x = torch.randn(2, 3, 32)
    return loop(model, optim.SGD(model.parameters(), 0.1), lambda: model(x).square().mean())


def _sequence_loss() -> Training:
    model, x, y = nn.Linear(8, 6), torch.randn(12, 3, 8), torch.randint(1, 6, (3, 4))
    lengths = torch.full((3,), 12), torch.full((3,), 4)
    return loop(model, optim.SGD(model.parameters(), 0.1), lambda: F.ctc_loss(model(x).log_softmax(-1), y, *lengths))


def _looked_up() -> Training:
    model, words = nn.Sequential(nn.EmbeddingBag(50, 8, mode="max"), nn.Linear(8, 4)), torch.randint(0, 50, (3, 7))
    return loop(model, optim.Adagrad(model.parameters()), lambda: model(words).square().mean())


def _convolved() -> Training:
    layers = nn.Conv2d(3, 8, 3), nn.MaxPool2d(2), nn.Conv2d(8, 8, 3, groups=8), nn.Upsample(scale_factor=2)
    model, x = nn.Sequential(*layers, nn.FractionalMaxPool2d(2, 4), nn.Flatten()), torch.randn(2, 3, 16, 16)
    return loop(model, optim.AdamW(model.parameters()), lambda: model(x).square().mean())


def _autocast_attention() -> Training:
    model, x = nn.TransformerEncoderLayer(32, 4, 64, dropout=0.0, batch_first=True), torch.randn(2, 10, 32)

    def loss() -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return torch.as_tensor(model(x)).float().square().mean()

    return loop(model, optim.AdamW(model.parameters()), loss)


def _mixture() -> Training:
    experts, gate = nn.ModuleList(nn.Linear(8, 8) for _ in range(4)), nn.Linear(8, 4)
    model, x = nn.ModuleList([experts, gate]), torch.randn(16, 8)

    def loss() -> torch.Tensor:
        weights, chosen = gate(x).softmax(-1).topk(2)
        out = torch.stack([expert(x) for expert in experts], 1)
        picked = out.gather(1, chosen[..., None].expand(-1, -1, 8))
        return torch.as_tensor((picked * weights[..., None]).sum(1).square().mean() + chosen.float().std())

    return loop(model, optim.AdamW(model.parameters()), loss)


FAMILIES: dict[str, Callable[[], Training]] = {
    "lstm": partial(_recurrent, nn.LSTM),
    "lstm_both_ways": partial(_recurrent, nn.LSTM, outputs=64, bidirectional=True, dropout=0.1),
    "lstm_projected": partial(_recurrent, nn.LSTM, outputs=8, proj_size=8),
    "gru": partial(_recurrent, nn.GRU),
    "rnn": partial(_recurrent, nn.RNN),
    "pooling": _pooled,
    "ctc": _sequence_loss,
    "embedding_bag": _looked_up,
    "convolution": _convolved,
    "autocast_attention": _autocast_attention,
    "mixture": _mixture,
}


@pytest.mark.filterwarnings("ignore:LSTM with projections")
@pytest.mark.parametrize("name", [*FEATURES, *FAMILIES])
def test_the_peak_is_that_on_real_tensors(name: str) -> None:
    """To the byte."""
    factory = (FEATURES | FAMILIES)[name]
    fake, real = (trace_training(factory, model="m", real=real, cuda_defaults=False) for real in (False, True))
    assert not fake.real
    assert fake.graph.training_peak_bytes == real.graph.training_peak_bytes
    if name != "embedding_bag":  # one of its results has a storage longer than itself, by one element
        assert fake.graph.resident_bytes == real.graph.resident_bytes


@pytest.mark.parametrize("name", NETWORKS)
def test_the_peak_of_a_network_is_that_on_real_tensors(name: str) -> None:
    """To the byte."""
    factory = partial(models.factory(name), batch_size=2, small=True)
    fake, real = (trace_training(factory, model="m", real=real) for real in (False, True))
    assert not fake.real
    assert fake.graph.training_peak_bytes == real.graph.training_peak_bytes


def test_a_workspace_is_held_until_the_backward_pass() -> None:
    """An LSTM's forward operators keep more than their inputs and outputs, and CUDA's reserve is named."""
    traced = trace_training(FAMILIES["lstm"], model="m", cuda_defaults=False)
    layers = [op for op in traced.graph.ops if op.name == "aten.mkldnn_rnn_layer.default"]
    kept = [traced.graph.tensors[i] for op in layers for i in op.writes]
    assert len(layers) == 2 and len(kept) == 8
    assert "LSTM: cuDNN keeps a reserve" in traced.notes[1]


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("name", ["checkpointing_reentrant", "checkpointing_not_reentrant", "forked_random_state"])
def test_random_state_is_no_device_memory(name: str, real: bool) -> None:
    """A generator's state is a tensor on the host, on any machine."""
    graph = trace_training(FEATURES[name], model="m", real=real).graph
    assert not any("rng_state" in tensor.name or tensor.size_bytes == 5056 for tensor in graph.tensors)
