"""What has no bytes to copy, or none that a file takes: compiling refuses it as attaching does, in one line."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import checkflow
from checkflow.checkpointing.files import layouts_of
from checkflow.errors import InputError, TraceError
from checkflow.runtime.matching import bind
from checkflow.schedule import Schedule, StateRow, ViewRow
from checkflow.torch_internals import FakeTensor, FakeTensorMode
from checkflow.trace.state import state_of
from checkflow.trace.tracing import trace_training
from checkflow.training import Training

Change = Callable[[nn.Sequential, torch.optim.Optimizer], dict[str, object]]
Make = Callable[[], torch.Tensor]


def made(change: Change, ran: list[int] | None = None) -> Training:
    """A small training with a change; `ran` gets an item for each iteration."""
    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3))
    sgd = torch.optim.SGD(model.parameters(), 0.1)
    extra = change(model, sgd)
    x, y = torch.randn(8, 4), torch.randint(0, 3, (8,))

    def iteration() -> None:
        if ran is not None:
            ran.append(1)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        sgd.step()
        sgd.zero_grad()

    return Training(model, sgd, iteration, extra)


def plain(_model: nn.Sequential, _sgd: torch.optim.Optimizer) -> dict[str, object]:
    return {}


def buffer(make: Make) -> Change:
    def change(model: nn.Sequential, _: torch.optim.Optimizer) -> dict[str, object]:
        model.register_buffer("odd", make())
        return {}

    return change


def parameter(make: Make) -> Change:
    def change(model: nn.Sequential, _: torch.optim.Optimizer) -> dict[str, object]:
        model.register_parameter("odd", nn.Parameter(make()))
        return {}

    return change


def slot(make: Make) -> Change:
    def change(model: nn.Sequential, sgd: torch.optim.Optimizer) -> dict[str, object]:
        sgd.state[model.get_parameter("0.bias")]["odd"] = make()
        return {}

    return change


def listed(make: Make) -> Change:
    return lambda _model, _sgd: {"odd": make()}


def in_dict(make: Make) -> Change:
    return lambda _model, _sgd: {"held": {"odd": make()}}


def nested_in_one_slot(model: nn.Sequential, sgd: torch.optim.Optimizer) -> dict[str, object]:
    sgd.state[model.get_parameter("0.bias")] |= {"a.b": torch.zeros(3), "a": {"b": torch.zeros(3)}}
    return {}


def no_text(model: nn.Sequential, _sgd: torch.optim.Optimizer) -> dict[str, object]:
    model.register_buffer("\udc80", torch.zeros(3))
    return {}


def lazy(model: nn.Sequential, sgd: torch.optim.Optimizer) -> dict[str, object]:
    model.append(nn.LazyLinear(2))
    sgd.add_param_group({"params": list(model[3].parameters())})
    return {}


def complex_zeros() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex64)


def a_sparse() -> torch.Tensor:
    return torch.eye(4).to_sparse()


def in_rows() -> torch.Tensor:
    return torch.eye(4).to_sparse_csr()


def a_nested() -> torch.Tensor:
    return torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])


def a_quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(4), 0.1, 0, torch.qint8)


def on_meta() -> torch.Tensor:
    return torch.zeros(4, device="meta")


def doubled() -> torch.Tensor:
    return torch.zeros(4, dtype=torch.complex128)


LAYOUT = "is not supported; keep it as a dense tensor"
LAZY = "is a lazy conjugate or negative; store its resolve_conj().resolve_neg()"
HOLES = "overlaps or has holes; make it contiguous"
META = "has no data yet (meta device); materialize it first"
DTYPE = "dtype complex128 cannot be stored; convert it first"

REFUSED: dict[str, tuple[Change, str]] = {
    "sparse": (buffer(a_sparse), f"model/odd: layout torch.sparse_coo {LAYOUT}"),
    "sparse rows": (slot(in_rows), f"optimizer/0.bias.odd: layout torch.sparse_csr {LAYOUT}"),
    "sparse, listed": (listed(a_sparse), f"extra.odd/tensor: layout torch.sparse_coo {LAYOUT}"),
    "sparse, in a dict": (in_dict(a_sparse), f"extra.held/odd: layout torch.sparse_coo {LAYOUT}"),
    "opaque": (buffer(lambda: torch.ones(4, 4).to_mkldnn()), f"model/odd: layout torch._mkldnn {LAYOUT}"),
    "nested": (buffer(a_nested), f"model/odd: layout nested {LAYOUT}"),
    "nested, in a dict": (in_dict(a_nested), f"extra.held/odd: layout nested {LAYOUT}"),
    "quantized": (slot(a_quantized), f"optimizer/0.bias.odd: layout quantized {LAYOUT}"),
    "holes": (parameter(lambda: torch.zeros(8, 8)[:, ::2]), f"model/odd: shape (8, 4) with strides (8, 2) {HOLES}"),
    "expanded": (buffer(lambda: torch.zeros(1).expand(4)), f"model/odd: shape (4,) with strides (0,) {HOLES}"),
    "overlapping": (
        listed(lambda: torch.zeros(8).as_strided((3, 3), (1, 1))),
        f"extra.odd/tensor: shape (3, 3) with strides (1, 1) {HOLES}",
    ),
    "conjugate": (buffer(lambda: complex_zeros().conj()), f"model/odd: {LAZY}"),
    "negative": (slot(lambda: complex_zeros().conj().imag), f"optimizer/0.bias.odd: {LAZY}"),
    "meta": (buffer(on_meta), f"model/odd: {META}"),
    "meta, in a dict": (in_dict(on_meta), f"extra.held/odd: {META}"),
    "dtype": (listed(doubled), f"extra.odd/tensor: {DTYPE}"),
    "dtype, in a dict": (in_dict(doubled), f"extra.held/odd: {DTYPE}"),
    "one name": (nested_in_one_slot, "optimizer/0.bias.a.b: two tensors of this training have that name; rename one"),
    "no text": (no_text, r"model/\udc80: its name is no text (a lone surrogate); rename it"),
    "no text, in a dict": (
        lambda *_: {"held": {"\udc80": torch.zeros(3)}},
        r"extra.held/\udc80: its name is no text (a lone surrogate); rename it",
    ),
    "lazy": (lazy, "model/3.weight: has no shape yet (a lazy module); run the model once first"),
}


@pytest.fixture(scope="module")
def schedule() -> Schedule:
    return checkflow.compile(lambda: made(plain), device="rtx3090")


@pytest.mark.filterwarnings("ignore:.*(beta|prototype|deprecated|Lazy modules).*")
@pytest.mark.parametrize(("change", "text"), REFUSED.values(), ids=REFUSED)
def test_compiling_refuses_what_attaching_does(change: Change, text: str, schedule: Schedule, tmp_path: Path) -> None:
    """The same bytes after MODEL's name, on fake tensors and on real ones, and before anything has run."""
    training, ran = made(change), list[int]()
    for given in (schedule, None):
        with pytest.raises(InputError) as attached:
            checkflow.attach(
                training.model, training.optimizer, schedule=given, store=tmp_path / "store", extra=training.extra
            )
        assert str(attached.value) == text
        assert not (tmp_path / "store").exists()
    for real in (False, True):
        with pytest.raises(TraceError) as traced:
            trace_training(lambda: made(change, ran), model="net.py", real=real)
        assert str(traced.value) == f"net.py: {text}"
    assert not ran


@pytest.mark.parametrize("real", [False, True])
def test_state_that_the_first_iteration_makes_is_refused_like_any(real: bool) -> None:
    """An optimizer's is not there before."""

    def factory() -> Training:
        training = made(plain)
        model, (sgd,) = training.models[0], training.optimizers

        def iteration() -> None:
            training.iteration()
            sgd.state[model.get_parameter("0.bias")].setdefault("odd", complex_zeros().conj())

        return Training(model, sgd, iteration)

    with pytest.raises(TraceError) as caught:
        trace_training(factory, model="net.py", real=real)
    assert str(caught.value) == f"net.py: optimizer/0.bias.odd: {LAZY}"


def test_a_parameter_of_no_stored_dtype_is_refused_where_its_files_are_laid_out(schedule: Schedule) -> None:
    """One that an earlier schedule has."""
    training = made(parameter(doubled))
    row = StateRow(id=99, bytes=64, written=False, views=(ViewRow(name="model/odd", dtype="complex128", shape=(4,)),))
    with pytest.raises(TraceError) as traced:
        state_of(training, "net.py")
    binding = bind(schedule.model_copy(update={"state": (*schedule.state, row)}), training)
    with pytest.raises(InputError) as attached:
        layouts_of(binding, 1)
    assert (str(attached.value), str(traced.value)) == (f"model/odd: {DTYPE}", f"net.py: model/odd: {DTYPE}")


def test_state_on_several_devices_is_refused(schedule: Schedule) -> None:
    """Both times; fake tensors are on devices that the machine lacks."""
    training = made(plain)
    with FakeTensorMode() as mode:
        for index in (0, 1):
            tensor = FakeTensor(mode, torch.empty(4, device="meta"), torch.device(f"cuda:{index}"))
            training.models[0].register_buffer(f"on_{index}", tensor)
    text = "model: its state lies on cuda:0, cuda:1; several devices in one process are not supported yet"
    with pytest.raises(InputError) as attached:
        bind(schedule, training)
    with pytest.raises(TraceError) as traced:
        state_of(training, "net.py")
    assert (str(attached.value), str(traced.value)) == (text, f"net.py: {text}")


@pytest.mark.filterwarnings("ignore:.*(beta|prototype).*")
@pytest.mark.parametrize("real", [False, True])
def test_what_has_no_storage_may_lie_about(real: bool) -> None:
    """A factory may make it; only an iteration that meets it is refused."""

    def factory(use: bool) -> Training:
        training, weights, more = made(plain), a_sparse(), a_nested()
        one = torch.ones(4, 1)

        def iteration() -> None:
            if use:
                torch.sparse.mm(weights, one)
            training.iteration()
            assert more is not None

        return Training(training.model, training.optimizer, iteration)

    assert trace_training(lambda: factory(use=False), model="net.py", real=real).graph.steps
    with pytest.raises(
        TraceError, match=r"test_refused\.py:\d+: takes a tensor of layout torch\.sparse_coo, which"
    ) as caught:
        trace_training(lambda: factory(use=True), model="net.py", real=real)
    assert "\n" not in str(caught.value)
