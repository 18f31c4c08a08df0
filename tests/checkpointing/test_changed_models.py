"""Models whose parameters become others, or one, while training runs; and what a run is told that it forgot."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

import checkflow

Act = Callable[[torch.nn.Sequential, torch.optim.Optimizer], None]


def tie(model: torch.nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[2].weight.data = model[0].weight.data


def another(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """A layer begins anew, as parameters of their own that have no state yet."""
    old = set(model[2].parameters())
    model[2] = torch.nn.Linear(4, 4)
    optimizer.param_groups[0]["params"] = list(model.parameters())
    for parameter in old:
        optimizer.state.pop(parameter)


def assign(model: torch.nn.Sequential, optimizer: torch.optim.Optimizer) -> None:
    """The same values in parameters that are others, with the state of those before."""
    before = list(model.parameters())
    model.load_state_dict({name: value.clone() for name, value in model.state_dict().items()}, assign=True)
    for old, new in zip(before, model.parameters(), strict=True):
        optimizer.state[new] = optimizer.state.pop(old)
    optimizer.param_groups[0]["params"] = list(model.parameters())


class Life:
    """A training that `act` changes after its third iteration."""

    def __init__(self, store: Path, act: Act | None, *, changed: bool = False, **options: object) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Tanh(), torch.nn.Linear(4, 4))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.01)
        self.act = act
        if changed and act is not None:
            act(self.model, self.optimizer)
        self.told: list[str] = []
        self.checkpointer = checkflow.attach(
            self.model,
            self.optimizer,
            store=store,
            tell=lambda _: None,
            notify=self.told.append,
            **options,  # type: ignore[arg-type]
        )

    def train(self, until: int) -> list[torch.Tensor]:
        with self.checkpointer as checkpointer:
            for number in range(checkpointer.restore(), until):
                if number == 3 and self.act is not None:
                    self.act(self.model, self.optimizer)
                self.model(torch.ones(2, 4)).square().sum().backward()
                self.optimizer.step()
                self.optimizer.zero_grad()
                checkpointer.step()
        return [each.detach().clone() for each in self.model.parameters()]


@pytest.mark.parametrize("act", [another, assign])
def test_a_parameter_may_be_another_one_of_its_shape(act: Act, tmp_path: Path) -> None:
    """It has the name of the one before, and a resumed run ends with the same bits."""
    expected = Life(tmp_path / "whole", act).train(20)
    Life(tmp_path / "cut", act).train(9)
    resumed = Life(tmp_path / "cut", act)
    assert all(map(torch.equal, resumed.train(20), expected))
    assert not resumed.told


def test_parameters_that_became_one_are_one_again_or_nothing_is_restored(tmp_path: Path) -> None:
    """The file has each for itself, with equal values: without a word the resumed run would train them apart."""
    expected = Life(tmp_path / "whole", tie).train(20)
    Life(tmp_path / "cut", tie).train(9)
    with pytest.raises(
        checkflow.InputError, match=r"model/2\.weight: is tied to model/0\.weight only in the checkpoint"
    ):
        Life(tmp_path / "cut", tie).train(20)
    assert all(map(torch.equal, Life(tmp_path / "cut", tie, changed=True).train(20), expected))


def test_a_kept_schedule_may_be_of_before_the_tie(tmp_path: Path) -> None:
    """The next run has one from the start, and follows what was learned of the run before."""
    Life(tmp_path, None).train(20)
    life = Life(tmp_path, tie, changed=True, start_over=True)
    life.train(5)
    again = Life(tmp_path, tie, changed=True)
    assert all(map(torch.equal, again.train(5), life.model.parameters()))


@pytest.mark.parametrize("act", [None, tie, another])
def test_what_changed_before_it_is_compared_is_no_error(act: Act | None, tmp_path: Path) -> None:
    """A checkpoint is compared with the training once its copies have ended, as late as in the next iteration."""
    life = Life(tmp_path, None)
    with life.checkpointer as checkpointer:
        for _ in range(2):
            life.model(torch.ones(2, 4)).square().sum().backward()
            life.optimizer.step()
            checkpointer.step()
        engine = checkpointer._engine
        before, record = engine._members(), b'{"not": "what a restore takes"}'
        if act is None:
            with pytest.raises(checkflow.InputError, match="no restore would take this training's checkpoints"):
                engine._checked_later(record, before)
        else:
            act(life.model, life.optimizer)
            assert engine._checked_later(record, before) is record
            assert engine._restorable is None  # so that the next one is compared


def exchange(model: torch.nn.Sequential, _: torch.optim.Optimizer) -> None:
    model[0], model[2] = model[2], model[0]


def test_layers_that_change_places_have_each_others_names(tmp_path: Path) -> None:
    """Their optimizer has them in another order than before, which a model that was not changed has not."""
    expected = Life(tmp_path / "whole", exchange).train(20)
    Life(tmp_path / "cut", exchange).train(9)
    with pytest.raises(checkflow.InputError, match="optimizer"):
        Life(tmp_path / "cut", exchange).train(20)
    assert all(map(torch.equal, Life(tmp_path / "cut", exchange, changed=True).train(20), expected))


class Counting(torch.optim.SGD):
    """Counts its updates, and gives and takes the number."""

    updates = 0

    def state_dict(self) -> dict[str, object]:
        return super().state_dict() | {"updates": self.updates}


def told(store: Path, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: object) -> list[str]:
    model = torch.nn.Linear(2, 2)
    made = optimizer(model.parameters(), lr=0.1)  # type: ignore[call-arg]
    given = {key: value(model, made) if callable(value) else value for key, value in options.items()}
    given.pop("beside", None)
    found: list[str] = []
    checkflow.attach(model, made, store=store, tell=lambda _: None, notify=found.append, **given).close()  # type: ignore[arg-type]
    return found


def cosine(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LRScheduler:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 10)


def counted(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, object]:
    optimizer.updates = 0  # type: ignore[attr-defined]
    return {"own": checkflow.Variables(optimizer.__dict__, "updates")}


def test_what_an_optimizer_gives_beside_its_state_is_named_unless_it_is_listed(tmp_path: Path) -> None:
    (line,) = told(tmp_path / "a", Counting)
    assert line.startswith("Counting: its state_dict() has 'updates' beside state and param_groups, and no checkpoint")
    assert not told(tmp_path / "b", Counting, extra=counted)
    assert not told(tmp_path / "c", Counting, extra=lambda _, optimizer: {"own": optimizer})


class Around(torch.optim.Optimizer):
    """Passes on the state of the optimizer in it, as pytorch_optimizer's wrappers do."""

    def __init__(self, parameters: Any, lr: float) -> None:
        self.optimizer = torch.optim.SGD(parameters, lr, momentum=0.9)
        self.tau, self.updates = 2.0, 0
        self.best = copy.deepcopy(self.optimizer.state_dict())
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()

    param_groups = property(lambda self: self.optimizer.param_groups)
    state = property(lambda self: self.optimizer.state)

    def step(self, closure: Any = None) -> Any:
        self.updates += 1
        return self.optimizer.step(closure)

    def state_dict(self) -> dict[str, Any]:
        return {"base": self.optimizer.state_dict(), "best": self.best, "tau": self.tau, "updates": self.updates}


class AroundAndBack(Around):
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.optimizer.load_state_dict(state_dict["base"])
        self.best, self.tau, self.updates = state_dict["best"], state_dict["tau"], state_dict["updates"]


def test_a_wrappers_keys_are_one_line_without_the_state_of_the_optimizer_in_it(tmp_path: Path) -> None:
    """An equal copy of that may be an older one, and is named. What it does not take back is not to be listed."""
    (line,) = told(tmp_path / "a", Around)
    assert line.startswith("Around: its state_dict() has 'best', 'tau', 'updates' beside what the optimizer in it has")
    assert line.endswith('attach(extra={"own": checkflow.Variables(vars(...), ...)})')
    (line,) = told(tmp_path / "b", AroundAndBack)
    assert line.endswith('and no checkpoint does; list it: attach(extra={"own": optimizer})')
    assert not told(tmp_path / "c", AroundAndBack, extra=lambda _, optimizer: {"own": optimizer})


def test_a_wrapper_that_is_listed_as_advised_goes_on(tmp_path: Path) -> None:
    counts = []
    for begun in (0, 3):
        model = torch.nn.Linear(2, 2)
        wrapper = AroundAndBack(model.parameters(), 0.1)
        with checkflow.attach(model, wrapper, store=tmp_path, extra={"own": wrapper}, tell=lambda _: None) as ckpt:
            assert ckpt.restore() == begun
            for _ in range(3):
                model(torch.ones(1, 2)).sum().backward()
                wrapper.step()
                model.zero_grad()
                ckpt.step()
        counts.append(wrapper.updates)
    assert counts == [3, 6]


def test_a_scheduler_that_is_not_attached_is_named(tmp_path: Path) -> None:
    """Whatever else is attached; not where it may be in what is the user's own, nor where there once was one."""

    class Own:
        def __init__(self, what: object) -> None:
            self.what = what

        def state_dict(self) -> dict[str, object]:
            return {}

        def load_state_dict(self, state_dict: dict[str, object]) -> None: ...

    scaler = torch.amp.GradScaler("cpu", enabled=False)
    count = {"count": 1}
    others: list[dict[str, Any]] = [{}, {"scaler": scaler}, {"extra": {"mine": checkflow.Variables(count, "count")}}]
    for number, given in enumerate(others):
        (line,) = told(tmp_path / f"{number}", beside=cosine, **given)
        assert line.startswith("optimizer: a scheduler sets its learning rate and is not attached")
    assert not told(tmp_path / "b", scheduler=cosine)
    assert not told(tmp_path / "c", extra=lambda model, optimizer: {"mine": cosine(model, optimizer)})
    assert not told(tmp_path / "d", extra=lambda model, optimizer: {"mine": Own(cosine(model, optimizer))})
    assert not told(
        tmp_path / "e", extra=lambda *both: {"at": checkflow.Variables(cosine(*both).__dict__, "last_epoch")}
    )
    assert not told(tmp_path / "f")
    assert not told(tmp_path / "g", beside=once_had_one)


def once_had_one(_: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for group in optimizer.param_groups:  # as load_state_dict leaves it
        group["initial_lr"] = 0.1


def test_of_two_schedulers_the_one_that_is_not_attached_is_named(tmp_path: Path) -> None:
    models = [torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)]
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in models]
    schedulers = [cosine(*both) for both in zip(models, optimizers, strict=True)]
    found: list[str] = []
    checkflow.attach(
        models, optimizers, store=tmp_path, scheduler=schedulers[0], tell=lambda _: None, notify=found.append
    ).close()
    (line,) = found
    assert line.startswith("optimizer.1: a scheduler sets its learning rate")


@pytest.mark.parametrize("other", ["itself", "view", "weight"])
def test_tensors_of_a_dict_that_share_memory_are_named(other: str, tmp_path: Path) -> None:
    def of(model: torch.nn.Linear, _: torch.optim.Optimizer) -> dict[str, object]:
        one = torch.zeros(2, 2)
        both = {"itself": one, "view": one[0], "weight": model.weight.detach()}
        return {"held": {"a": one, "b": both[other]}}

    (line,) = told(tmp_path, extra=of)
    with_what = "model/weight" if other == "weight" else "extra.held/a"
    assert line.startswith(f"extra.held/b: has memory in common with {with_what}, and will not after a restore")


def test_a_memory_whose_items_share_rows_is_named_once(tmp_path: Path) -> None:
    """As one of what was seen before and after each step."""
    rows = [torch.zeros(2) for _ in range(9)]
    (line,) = told(tmp_path, extra={"buf": list(pairwise(rows))})
    assert line.startswith("extra.buf/1.0: has memory in common with extra.buf/0.1 (6 more have so), and will not")


def test_what_shares_a_storage_and_no_byte_is_not(tmp_path: Path) -> None:
    """As of one flat average, or of a hidden state that was cut in two."""

    def of(_model: torch.nn.Module, _optimizer: torch.optim.Optimizer) -> dict[str, object]:
        first, second = torch.zeros(2, 4).unbind()
        return {"held": {"a": first, "b": second}}

    assert not told(tmp_path, extra=of)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")
@pytest.mark.parametrize("part", [False, True])
def test_torchscript_is_refused_by_name(part: bool, tmp_path: Path) -> None:
    scripted = torch.jit.script(torch.nn.Linear(2, 2))
    model = torch.nn.Sequential(scripted) if part else scripted
    where = "model/0" if part else "model"
    with pytest.raises(checkflow.InputError, match=f"^{where}: is TorchScript, whose code runs without hooks"):
        checkflow.attach(model, torch.optim.SGD(model.parameters()), store=tmp_path)
