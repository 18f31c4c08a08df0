"""Looking into an update changes nothing else: not for others, not afterwards."""

from __future__ import annotations

import threading

import pytest
import torch

from checkflow.foreach import Look, can_look, writes_first

PLAIN = {name: found for name, found in vars(torch).items() if name.startswith("_foreach_")}


def optimizer(**options: object) -> torch.optim.AdamW:
    parameters = [torch.nn.Parameter(torch.ones(3)) for _ in range(2)]
    for parameter in parameters:
        parameter.grad = torch.ones(3)
    return torch.optim.AdamW(parameters, foreach=True, **options)  # type: ignore[arg-type]


def untouched() -> bool:
    return all(vars(torch)[name] is found for name, found in PLAIN.items())


def test_each_function_is_seen_before_it_runs() -> None:
    """With what it writes, as it was."""
    made = optimizer(weight_decay=0.5, lr=1.0)
    seen: list[tuple[str, float]] = []
    look = Look(lambda name, tensors: seen.append((name, float(tensors[0].sum()))), 0)
    assert look.open() and not untouched()
    made.step()
    look.close()
    assert untouched()
    written = [name for name, _ in seen if writes_first(name)]
    assert written[:4] == ["_foreach_add_", "_foreach_mul_", "_foreach_lerp_", "_foreach_mul_"]
    assert dict(reversed(seen))["_foreach_mul_"] == 3.0  # the weights, before they decay
    count = len(seen)
    made.step()
    assert len(seen) == count


def test_an_update_within_an_update_is_the_inner_ones() -> None:
    outer, inner = list[str](), list[str]()
    first, second = Look(lambda name, _: outer.append(name), 0), Look(lambda name, _: inner.append(name), 0)
    first.open()
    torch._foreach_neg([torch.ones(1)])
    second.open()
    torch._foreach_abs([torch.ones(1)])
    second.close()
    torch._foreach_exp([torch.ones(1)])
    first.close()
    assert (outer, inner) == (["_foreach_neg", "_foreach_exp"], ["_foreach_abs"]) and untouched()


def test_an_update_that_is_recorded_is_still_guarded() -> None:
    """Each of two that look on, however one lies within the other."""
    guards, records = list[str](), list[str]()
    guard, record = Look(lambda name, _: guards.append(name), "runtime"), Look(lambda name, _: records.append(name), 0)
    guard.open()
    record.open()
    torch._foreach_neg([torch.ones(1)])
    guard.close()
    assert guards == records == ["_foreach_neg"] and untouched()


def test_one_that_was_left_open_ends_with_the_one_around_it() -> None:
    """As where the inner `step()` raised."""
    first, second = Look(lambda *_: None, 0), Look(lambda *_: None, 0)
    assert first.open() and second.open()
    first.close()
    assert not second.is_open and untouched()


def test_another_threads_update_is_not_looked_into() -> None:
    """Nor can it be, while this one's is."""
    seen: list[str] = []
    look, other = Look(lambda name, _: seen.append(name), 0), Look(lambda name, _: seen.append(name), 0)
    look.open()
    opened: list[bool] = []

    def update() -> None:
        opened.append(other.open())
        optimizer().step()

    thread = threading.Thread(target=update)
    thread.start()
    thread.join()
    look.close()
    assert opened == [False] and seen == [] and untouched()


def test_what_can_be_looked_into() -> None:
    class Own(torch.optim.AdamW):
        """May write whatever it likes in `step()`."""

    parameter = torch.nn.Parameter(torch.ones(2))
    assert can_look(optimizer())
    assert not can_look(Own([parameter]))
    assert not can_look(torch.optim.SGD([torch.nn.Parameter(torch.ones(2, dtype=torch.complex64))]))


@pytest.mark.parametrize("name", sorted(PLAIN))
def test_a_wrapped_function_is_known_as_itself(name: str) -> None:
    look = Look(lambda *_: None, 0)
    look.open()
    wrapped = vars(torch)[name]
    look.close()
    assert wrapped.__name__ == PLAIN[name].__name__ and wrapped is not PLAIN[name]
