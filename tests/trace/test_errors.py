"""One line for each thing that is wrong with a model file, and what the notes say of what was assumed."""

from __future__ import annotations

import asyncio
import inspect
import itertools
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from data_dependent import DATA_DEPENDENT
from torch import nn, optim
from trainings import FEATURES, batch, classify, loop, mlp

from checkflow import Training, models
from checkflow.errors import InputError, ModelFileError, TraceError
from checkflow.trace import memory, trace_training


def refused(factory: Callable[[], object], *, real: bool = False) -> str:
    """The one line that refuses a factory."""
    with pytest.raises(InputError) as caught:
        trace_training(factory, model="net.py", real=real)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "\n" not in text and issubclass(caught.type, (TraceError, ModelFileError))
    return text


def with_iteration(act: Callable[[nn.Sequential, optim.Optimizer], object]) -> Callable[[], Training]:
    """A training whose iteration runs backward, then `act`, then the update."""

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        sgd = optim.SGD(model.parameters(), 0.1, momentum=0.9)

        def iteration() -> None:
            torch.autograd.backward(F.cross_entropy(model(x), y))
            act(model, sgd)
            sgd.step()
            sgd.zero_grad()

        return Training(model, sgd, iteration)

    return factory


def test_a_factory_that_raises() -> None:
    """It names what happened, and where."""

    def raises() -> Training:
        raise ValueError("no such\nlayer")

    line = raises.__code__.co_firstlineno + 1
    assert refused(raises) == (
        f"net.py: the factory raised ValueError: no such layer at {__file__}:{line}; correct it there"
    )


class _SilentError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no")


def test_what_a_factory_raises_may_fail_at_saying_what_it_is() -> None:
    def raises() -> Training:
        raise _SilentError

    line = raises.__code__.co_firstlineno + 1
    assert refused(raises) == f"net.py: the factory raised _SilentError at {__file__}:{line}; correct it there"


@pytest.mark.parametrize("within", [False, True], ids=["iterator", "generator"])
def test_data_that_runs_dry_is_no_fault_of_the_line_that_takes_it(within: bool) -> None:
    """Nobody knows by the line alone that an iteration is run more than once."""

    def factory() -> Training:
        model = mlp()
        sgd, once = optim.SGD(model.parameters(), 0.1), iter([batch()])
        loader = (next(once) for _ in range(9)) if within else once

        def iteration() -> None:
            x, y = next(loader)
            torch.autograd.backward(F.cross_entropy(model(x), y))
            sgd.step()
            sgd.zero_grad()

        return Training(model, sgd, iteration)

    text = refused(factory)
    assert "StopIteration" in text and text.endswith(
        "; correct it there: the iteration is run several times, so let it use one batch, or itertools.cycle(...)"
    )


def test_a_long_message_ends_with_a_word() -> None:
    def raises() -> Training:
        raise ValueError("several words " * 50)

    assert " ... at " in refused(raises) and "words ..." in refused(raises)


def test_a_factory_that_returns_something_else() -> None:
    assert "the factory returned dict" in refused(dict)
    assert "the factory returned no model" in refused(lambda: Training([], [], lambda: None))
    assert "model is int" in refused(lambda: Training([3], [], lambda: None))  # type: ignore[list-item]
    assert "optimizer is str" in refused(lambda: Training(mlp(), ["adam"], lambda: None))  # type: ignore[list-item]
    assert "iteration is int" in refused(lambda: Training(mlp(), optim.SGD(mlp().parameters()), 3))  # type: ignore[arg-type]

    def exits() -> Training:
        raise SystemExit(3)

    assert "SystemExit" in refused(exits)


def test_an_iteration_that_raises() -> None:
    """The user's line, not torch's."""

    def act(model: nn.Module, _: object) -> None:
        model(torch.randn(2, 5))

    line = act.__code__.co_firstlineno + 1
    text = refused(with_iteration(act))
    assert text.startswith("net.py: the iteration raised RuntimeError: mat1 and mat2") and f"{__file__}:{line}" in text


def test_an_iteration_that_updates_nothing() -> None:
    """Backward alone is no training."""

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        return Training(model, optim.SGD(model.parameters()), lambda: F.cross_entropy(model(x), y).backward())  # type: ignore[no-untyped-call]

    assert "writes no parameter; let it call optimizer.step()" in refused(factory)


def test_an_iteration_of_which_a_call_runs_nothing() -> None:
    def iteration() -> Iterator[None]:
        yield

    async def later() -> None:
        """Nobody awaits it."""

    for one, kind in ((iteration, "a generator"), (later, "an async function")):

        def factory(one: Callable[[], object] = one) -> Training:
            model = mlp()
            return Training(model, optim.SGD(model.parameters()), one)

        assert f"iteration is {kind}" in refused(factory)


def first(model: nn.Sequential) -> nn.Parameter:
    """The first layer's weight."""
    return next(model.parameters())


def test_state_that_is_created_dropped_or_resized() -> None:
    """The tensor is named, with the way out: no checkpoint has room for it."""

    def create(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
        state = optimizer.state[first(model)]
        if state:  # from the second iteration on
            state["extra"] = torch.zeros(3)

    def drop(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
        optimizer.state[first(model)]["extra"] = torch.zeros(3)
        if "momentum_buffer" in optimizer.state[first(model)]:
            del optimizer.state[first(model)]["extra"]

    def resize(model: nn.Sequential, optimizer: optim.Optimizer) -> None:
        state = optimizer.state[first(model)]
        state["extra"] = torch.zeros(len(state.get("extra", ())) + 1)

    assert "creates optimizer/0.weight.extra; keep state" in refused(with_iteration(create))
    assert "drops optimizer/0.weight.extra" in refused(with_iteration(drop))
    assert "makes optimizer/0.weight.extra a tensor of shape (2,)" in refused(with_iteration(resize))


def branching(warm: bool) -> Training:
    """Of two layers the first iteration updates one, and the second the other."""
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    turns = itertools.cycle(model)

    def iteration() -> None:
        next(turns)(torch.ones(2, 4)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(2 if warm else 0):
        iteration()
    return Training(model, optimizer, iteration)


def test_branches_that_take_turns() -> None:
    """What is new is an update, and not only the state that comes with it; the advice helps."""
    line = refused(partial(branching, warm=False))
    assert "the iteration updates model/1.weight, which those before it did not (branches that take turns?)" in line
    assert "let the factory make an update of every parameter" in line
    assert trace_training(partial(branching, warm=True), model="m").graph.steps


def test_lists_of_state_that_grow_are_refused_at_once() -> None:
    """Before anything is run."""
    ran: list[int] = []

    def factory() -> Training:
        model = mlp()
        return Training(model, optim.LBFGS(model.parameters()), lambda: ran.append(1))

    assert "LBFGS keeps lists of tensors that grow and shrink" in refused(factory)
    assert not ran


def test_an_optimizer_that_is_none_names_what_it_holds() -> None:
    """One line, whether it stands alone or in a list."""

    class Chained:
        def __init__(self, *optimizers: optim.Optimizer) -> None:
            self.optimizers = optimizers

    def factory(many: bool) -> Training:
        model = mlp()
        chained = Chained(optim.SGD(model[:1].parameters()), optim.Adam(model[1:].parameters()))
        return Training(model, [chained] if many else chained, lambda: None)  # type: ignore[arg-type, list-item]

    for many in (False, True):
        text = refused(lambda many=many: factory(many))  # type: ignore[misc]
        assert "optimizer is Chained; give a torch.optim.Optimizer" in text and "it holds SGD and Adam" in text


def test_an_optimizer_of_a_parameter_outside_the_models() -> None:
    """No checkpoint of the models would hold it."""

    def factory() -> Training:
        model, prompt = mlp(), nn.Parameter(torch.zeros(4))
        return classify(model, optim.SGD([*model.parameters(), prompt], 0.1))

    assert "optimizer updates parameter 6 of group 0, shape (4,), which belongs to no model" in refused(factory)


@pytest.mark.parametrize("real", [False, True])
def test_what_a_factory_asks_for_or_leaves_by_is_told(real: bool) -> None:
    """A variable that is not set is no mistake of the file; and not all that is raised is an Exception."""

    def asks() -> Training:
        return classify(mlp(int(os.environ["NOT_SET"])), [])

    def leaves() -> Training:
        raise asyncio.CancelledError("x")

    def empty() -> Training:
        model = nn.ParameterList([nn.Parameter(torch.zeros(0))])
        return Training(model, optim.SGD(model.parameters(), 0.1), lambda: None)

    def zero() -> Training:
        return Training(torch.tensor(3), optim.SGD(mlp().parameters(), 0.1), lambda: None)  # type: ignore[arg-type]

    assert "asks for the environment variable NOT_SET, which is not set" in refused(asks, real=real)
    assert "the factory raised CancelledError: x" in refused(leaves, real=real)
    assert "no parameter has an element; give its layers a size" in refused(empty, real=real)
    assert "model is Tensor; give an nn.Module or a list of them" in refused(zero, real=real)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")
@pytest.mark.parametrize("real", [False, True])
def test_cuda_without_cuda(real: bool) -> None:
    """A factory that asks for CUDA where there is none hears so, whichever way it asks."""

    def by_device() -> Training:
        return classify(nn.Linear(4, 3, device="cuda"), [])

    def by_method() -> Training:
        return classify(mlp().cuda(), [])

    def by_to() -> Training:
        return classify(mlp().to("cuda"), [])

    for factory in (by_device, by_method, by_to):
        text = refused(factory, real=real)
        assert f"{__file__}:{factory.__code__.co_firstlineno + 1}: asks for CUDA" in text


def test_distributed_wrappers_are_refused_by_name() -> None:
    """DataParallel stands for its kind; the others are known by class name alone."""

    class FullyShardedDataParallel(nn.Module):
        def __init__(self, module: nn.Module) -> None:
            super().__init__()
            self.module = module

    def factory() -> Training:
        model = FullyShardedDataParallel(mlp())
        return classify(model, optim.SGD(model.parameters(), 0.1))

    assert "FSDP is not supported yet; use FSDP2 (fully_shard), " in refused(factory)


def test_sparse_gradients_are_refused() -> None:
    """They have no storage."""

    def factory() -> Training:
        model, words = nn.Embedding(10, 3, sparse=True), torch.randint(0, 10, (4,))
        return loop(model, optim.SGD(model.parameters(), 0.1), lambda: model(words).sum())

    line = refused(factory)
    assert "makes a sparse tensor" in line and "sparse ones, attach goes on without a plan" in line


@pytest.mark.skipif(torch.cuda.is_available(), reason="the machine has CUDA")
def test_autocast_for_cuda_does_nothing_on_a_cpu() -> None:
    """That is a note, not a warning; it names the line that torch's warning names, before torch 2.10 one of its own."""
    line_of = __file__ if torch.__version__ >= (2, 10) else inspect.getfile(torch.autocast)  # type: ignore[operator]

    def factory() -> Training:
        model, (x, y) = mlp(), batch()

        def loss() -> torch.Tensor:
            with torch.autocast("cuda", dtype=torch.float16):
                return F.cross_entropy(model(x), y)

        return loop(model, optim.SGD(model.parameters(), 0.1), loss)

    notes = trace_training(factory, model="m").notes
    assert [note for note in notes if "autocast" in note and note.startswith(f"{line_of}:")] == [notes[-1]]


def test_real_tensors_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """A data-dependent iteration needs the memory that fake tensors save."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 100)
    text = refused(DATA_DEPENDENT["loss_logged"])
    assert "data_dependent.py:" in text and "needs values" in text and "100 B is free" in text


def test_a_factory_that_reads_what_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights are real for as long as it runs, if there is room for them."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    text = refused(FEATURES["weights_read_by_the_factory"])
    assert "_local_scalar_dense" in text and "trainings.py:" in text
    assert "its factory takes more than" in text and "977 KiB is free" in text


def test_real_tensors_that_outgrow_the_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nothing was known before, the trace ends before the system ends it."""
    monkeypatch.setattr(memory, "available_bytes", lambda: 1_000_000)
    text = refused(partial(models.factory("bert"), batch_size=2), real=True)
    assert "asked to trace on real tensors, but its factory takes more than" in text and "without --real" in text


def test_the_estimate_counts_gradients_and_optimizer_state(monkeypatch: pytest.MonkeyPatch) -> None:
    """An iteration that breaks off in its forward pass will hold four times its parameters under Adam."""

    def factory() -> Training:
        model, x = nn.Linear(1000, 1000, bias=False), torch.randn(1, 1000)

        def loss() -> torch.Tensor:
            assert model.weight.sum().item() < 1e9
            return F.linear(x, model.weight).sum()

        return loop(model, optim.Adam(model.parameters()), loss)

    monkeypatch.setattr(memory, "available_bytes", lambda: 12_000_000)
    assert "its iteration takes at least 15.3 MiB and 11.4 MiB is free" in refused(factory)


def test_a_mistake_is_not_repeated_on_real_tensors() -> None:
    """No fake tensor raises an AttributeError: real ones would raise it again, later."""
    built = []

    def factory() -> Training:
        built.append(1)
        model = mlp()
        return loop(model, optim.SGD(model.parameters(), 0.1), lambda: model.no_such_thing)  # type: ignore[arg-type, return-value]

    assert "AttributeError: 'Sequential' object has no attribute 'no_such_thing'" in refused(factory)
    assert len(built) == 1


def test_the_note_names_the_function_of_the_library_that_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And the line of the user's that called it."""
    library = tmp_path / "site-packages" / "sleeves.py"
    library.parent.mkdir()
    library.write_text("def checked(loss):\n    assert loss.item() < 1e9\n    return loss\n")
    monkeypatch.syspath_prepend(str(library.parent))
    import sleeves  # type: ignore[import-not-found]

    def factory() -> Training:
        model, (x, y) = mlp(), batch()
        return loop(model, optim.SGD(model.parameters(), 0.1), lambda: sleeves.checked(F.cross_entropy(model(x), y)))

    line = factory.__code__.co_firstlineno + 2
    note = trace_training(factory, model="m").notes[0]
    assert note == (
        f"aten._local_scalar_dense.default in checked at {library}:2, called at {__file__}:{line} needs values: "
        "traced on real tensors"
    )


def test_notes_say_what_was_assumed() -> None:
    """On a CPU: that it was one, and which optimizers were given CUDA's foreach form."""

    def factory() -> Training:
        model = mlp()
        return classify(model, optim.AdamW(model.parameters()))

    assumed = trace_training(factory, model="m")
    assert "traced on the CPU" in assumed.notes[0]
    assert assumed.notes[1] == "AdamW: foreach=True assumed, the default on CUDA"
    assert any(op.name.startswith("aten._foreach_") for op in assumed.graph.ops)
    as_is = trace_training(factory, model="m", cuda_defaults=False)
    assert len(as_is.notes) == 1
    assert not any(op.name.startswith("aten._foreach_") for op in as_is.graph.ops)


def test_progress_and_arguments() -> None:
    """Progress names each phase; model and arguments are kept as given."""
    said: list[str] = []
    traced = trace_training(FEATURES["gan"], model="gan.py", arguments=(("batch_size", "4"),), progress=said.append)
    assert said == ["building the model", "iteration 1 of 2", "iteration 2 of 2, recording"]
    assert (traced.graph.model, traced.graph.arguments) == ("gan.py", (("batch_size", "4"),))
    assert (traced.graph.device, traced.graph.traced_on, traced.real) == ("", "cpu", False)


def test_a_long_iteration_is_counted_as_it_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("checkflow.trace.recorder.COUNTED", 10)
    said: list[str] = []
    steps = trace_training(FEATURES["gan"], model="gan.py", progress=said.append).graph.steps
    assert said[3:] == [f"iteration 2 of 2, {count} operators recorded" for count in range(10, steps + 1, 10)]
