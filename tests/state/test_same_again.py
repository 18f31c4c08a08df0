"""What containers have twice is one again after a restore; what iterates in an order does so again, or that is told."""

from __future__ import annotations

from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import checkflow
from checkflow.errors import FormatError, InputError
from checkflow.state.host.decode import decode, load
from checkflow.state.host.encode import encode
from checkflow.state.host.json_values import Json, dump
from checkflow.state.host.tensors import split

CHANGING = (list, dict, set, deque, np.ndarray)
MAKE: dict[str, Callable[[list[object]], object]] = {
    "list": lambda parts: parts,
    "dict": lambda parts: {str(index): part for index, part in enumerate(parts)},
    "a dict with other keys": lambda parts: dict(enumerate(parts)),
    "ordered": lambda parts: OrderedDict((str(index), part) for index, part in enumerate(parts)),
    "deque": lambda parts: deque(parts, 9),
    "tuple": tuple,
    "set": lambda parts: {len(parts), "text"},
    "frozenset": lambda parts: frozenset({len(parts)}),
    "counter": lambda parts: Counter({"one": len(parts)}),
    "array": lambda parts: np.arange(len(parts)),
    "tensor": lambda parts: torch.arange(len(parts)),
    "number": len,
}


@st.composite
def graphs(draw: st.DrawFn) -> dict[str, object]:
    """Nodes of which each holds any of those before it, as often as it likes."""
    nodes: list[object] = [()]
    for kind in draw(st.lists(st.sampled_from(list(MAKE)), max_size=9)):
        nodes.append(MAKE[kind](draw(st.lists(st.sampled_from(nodes), max_size=4))))
    return {str(index): node for index, node in enumerate(draw(st.lists(st.sampled_from(nodes), max_size=6)))}


def parts(value: object) -> Iterator[object]:
    """All there is, in one order, what is there twice twice."""
    yield value
    if isinstance(value, dict):
        yield from chain.from_iterable(map(parts, value.values()))
    elif isinstance(value, (list, tuple, deque)):
        yield from chain.from_iterable(map(parts, value))


def pattern(value: object) -> list[tuple[type, int]]:
    """Of each part which of those that can be changed it is, by the order in which they are met."""
    numbers: dict[int, int] = {}
    return [
        (type(part), numbers.setdefault(id(part), len(numbers)) if isinstance(part, CHANGING) else -1)
        for part in parts(value)
    ]


def again(value: dict[str, object]) -> dict[str, Any]:
    """As a checkpoint has what was listed."""
    written = encode(split("extra.held", value, {}).state, "extra.held")
    found = decode(load(dump(written).encode(), "text"), "extra.held")
    assert isinstance(found, dict)
    return found


@given(graphs())
def test_what_is_one_thing_is_one_again(value: dict[str, object]) -> None:
    """Which parts are the same list, dict, set, deque or array, and no others, in any graph of them."""
    assert pattern(again(value)) == pattern(value)


@given(graphs())
def test_a_record_of_what_is_met_once_is_as_it_was(value: dict[str, object]) -> None:
    numbers = [number for _, number in pattern(value) if number >= 0]
    is_shared = len(numbers) != len(set(numbers))
    assert ("$same" in dump(encode(value, "value"))) is is_shared


def loop_of_one() -> list[object]:
    loop: list[object] = []
    loop += [loop, loop]
    return loop


def loop_of_two() -> dict[str, object]:
    one: dict[str, object] = {}
    one["other"] = deque([(one,)])
    return one


@pytest.mark.parametrize("loop", [loop_of_one(), loop_of_two()], ids=["one", "two"])
def test_what_contains_itself_is_refused_where_it_does(loop: object) -> None:
    """In one line, soon, and by the path that closes the loop."""
    where = r"\[0\]" if isinstance(loop, list) else r"\.other\[0\]\[0\]"
    with pytest.raises(InputError, match=rf"^value{where}: contains itself; "):
        encode(loop, "value")
    with pytest.raises(InputError, match=r"^extra\.held\.[^ ]*: contains itself; [^\n]*$"):
        again({"kept": [1, loop]})


@pytest.mark.parametrize("number", [0, 1, -1, True, 1.0, "0", None, []], ids=repr)
def test_a_part_that_was_not_there_before_is_refused(number: Json) -> None:
    """Of one that is not whole yet likewise."""
    with pytest.raises(FormatError, match="names a part that was not there before"):
        decode([{"$same": number}], "value")


class Life:
    """A training with containers that are listed."""

    def __init__(self, store: Path, **listed: object) -> None:
        self.told: list[str] = []
        model = torch.nn.Linear(1, 1)
        self.checkpointer = checkflow.attach(
            model,
            torch.optim.SGD(model.parameters(), lr=0.1),
            store=store,
            extra=listed,
            tell=lambda _: None,
            notify=self.told.append,
        )

    def __enter__(self) -> checkflow.Checkpointer:
        return self.checkpointer

    def __exit__(self, *_: object) -> None:
        self.checkpointer.close()


@pytest.mark.parametrize("kind", ["dict", "variables"])
def test_an_episode_in_a_memory_goes_on_in_it(kind: str, tmp_path: Path) -> None:
    """A list that is the last item of another one, with a tensor in it and an array that both have."""
    seen = np.zeros(2)
    episode = [torch.zeros(2), seen]
    lives: list[dict[str, Any]] = [{"memory": [[1], episode], "episode": episode, "seen": seen}]
    lives.append({"memory": [], "episode": [], "seen": np.ones(2)})
    for held in lives:
        listed = held if kind == "dict" else checkflow.Variables(held, *held)
        life = Life(tmp_path / "store", held=listed)
        with life as checkpointer:
            checkpointer.restore()
            held["episode"].append(2)
            held["seen"][0] += 1
            checkpointer.step()
        assert not life.told
    resumed = lives[1]
    assert resumed["memory"][1] is resumed["episode"] and resumed["episode"][2:] == [2, 2]
    assert resumed["episode"][1] is resumed["seen"] and resumed["seen"].tolist() == [2, 0]


def test_a_list_within_is_another_one_and_the_listed_one_stays(tmp_path: Path) -> None:
    for number in range(2):
        memory: list[object] = [[number]]
        inner = memory[0]
        with Life(tmp_path / "store", memory=memory) as checkpointer:
            begun = checkpointer.restore()
            assert (memory[0] is inner) is (begun == 0)
            checkpointer.step()
    assert memory == [[0]]


def once_large() -> set[int]:
    """It iterates as a large set does."""
    pool = set(range(1000))
    for member in set(pool) - {1, 64}:
        pool.discard(member)
    return pool


def in_order(*members: int) -> set[int]:
    pool: set[int] = set()
    for member in members:
        pool.add(member)
    return pool


@pytest.mark.parametrize("members", [(8, 0, 16), (16, 8, 0), (0, 16, 8), ()])
def test_a_set_iterates_as_it_did(members: tuple[int, ...], tmp_path: Path) -> None:
    pool = in_order(*members)
    assert list(pool) == list(members)  # whose hashes meet, so the first to come is the first
    held: dict[str, Any] = {"pool": pool, "frozen": frozenset(pool)}
    was = [list(each) for each in held.values()]
    with Life(tmp_path / "store", held=held) as checkpointer:
        checkpointer.step()
    held.clear()
    life = Life(tmp_path / "store", held=held)
    with life as checkpointer:
        assert checkpointer.restore() == 1
        assert [list(each) for each in held.values()] == was
    assert not life.told


def test_a_set_that_iterates_otherwise_is_told_of(tmp_path: Path) -> None:
    held: dict[str, Any] = {"pool": once_large()}
    assert list(held["pool"]) == [1, 64] and list({1, 64}) == [64, 1]
    with Life(tmp_path / "store", held=held) as checkpointer:
        checkpointer.step()
    life = Life(tmp_path / "store", held=held)
    with life as checkpointer:
        assert checkpointer.restore() == 1
    (line,) = life.told
    assert "extra.held: a set in it has its members in another order than when it was saved; where the loop" in line
    assert list(held["pool"]) == [64, 1]


KEPT: dict[str, object] = {
    "a dict's order": {"b": 1, "a": 2, 3: 4},
    "an ordered dict's": OrderedDict([("b", 1), ("a", 2)]),
    "a counter's": Counter({"b": 1, "a": 5}),
    "a deque's length": deque([1, 2], maxlen=3),
    "columns first": np.asfortranarray(np.arange(6).reshape(2, 3)),
    "no dimension": np.array(1.5),
    "a number": np.float32(1.5),
    "every second": np.arange(6)[::2],
    "backwards": np.arange(3)[::-1],
    "one number at many places": np.broadcast_to(np.float64(2), (3,)),
    "another byte order": np.arange(3, dtype=">i4"),
    "no element": np.zeros((0, 3)),
}


@pytest.mark.parametrize("kind", KEPT)
def test_it_is_kept(kind: str) -> None:
    value: Any = KEPT[kind]
    found = again({"x": value})
    assert type(found["x"]) is type(value)
    if isinstance(value, (np.ndarray, np.generic)):
        is_fortran = np.asarray(value).flags.fnc, np.asarray(found["x"]).flags.fnc
        assert found["x"].dtype == value.dtype and found["x"].shape == value.shape
        assert np.array_equal(found["x"], value) and is_fortran[0] == is_fortran[1]
    else:
        assert list(found["x"]) == list(value) and found["x"] == value
        assert getattr(found["x"], "maxlen", None) == getattr(value, "maxlen", None)


REFUSED: dict[str, object] = {
    "fields": np.zeros(2, dtype=[("x", "f4"), ("y", "i4")]),
    "objects": np.array([None], dtype=object),
    "text": np.array(["text"]),
    "dates": np.zeros(2, dtype="M8[s]"),
    "a matrix": np.ma.masked_array([1.0, 2.0], [True, False]),
}


@pytest.mark.parametrize("kind", REFUSED)
def test_it_is_refused(kind: str) -> None:
    with pytest.raises(InputError, match=r"^extra\.held\.x: an? [^\n]* cannot be saved; keep [^\n]*$"):
        again({"x": REFUSED[kind]})
