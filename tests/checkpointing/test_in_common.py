"""What listed containers have in common, and will not after a restore, is told of; and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import checkflow

Listed = dict[str, Any]


def said(store: Path, listed: Listed, act: Callable[[int], object] = lambda _: None, iterations: int = 0) -> list[str]:
    told: list[str] = []
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with checkflow.attach(
        model, optimizer, store=store, extra=listed, tell=lambda _: None, notify=told.append
    ) as checkpointer:
        for iteration in range(iterations):
            act(iteration)
            checkpointer.step()
    return told


def of_memory(kind: str) -> Listed:
    buffer, table = np.zeros((6, 2), np.float32), torch.zeros(4, 2)
    held = {
        "a tensor over an array": {"a": buffer, "b": torch.from_numpy(buffer)},
        "rows": {"a": buffer, "b": buffer[2:4]},
        "rows backwards": {"a": buffer, "b": buffer[::-1]},
        "two windows": {"a": torch.from_numpy(buffer[:4]), "b": torch.from_numpy(buffer[3:])},
        "an array over a tensor": {"a": table, "b": table.numpy()[1:]},
        "the same bytes": {"a": buffer, "b": buffer.view(np.int32)},
        "two arrays of it": {"a": buffer, "b": buffer[:]},
    }
    if kind in held:
        return {"held": held[kind]}
    names = {"a": buffer, "b": buffer[1:]}
    return {"held": checkflow.Variables(names, "a", "b")}


@pytest.mark.parametrize(
    "kind",
    [
        "a tensor over an array", "rows", "rows backwards", "two windows", "an array over a tensor", "the same bytes",
        "two arrays of it", "variables",
    ],
)  # fmt: skip
def test_memory_in_common_is_named(kind: str, tmp_path: Path) -> None:
    (line,) = said(tmp_path, of_memory(kind))
    assert line.startswith("extra.held/b: has memory in common with extra.held/a, and will not after a restore")


def test_memory_of_two_containers_is_named(tmp_path: Path) -> None:
    array = np.zeros(2)
    (line,) = said(tmp_path, {"one": {"x": array}, "two": [array]})
    assert line.startswith("extra.two/0: has memory in common with extra.one/x, and will not after a restore")


def test_a_memory_of_many_rows_is_named_once(tmp_path: Path) -> None:
    """Soon: those that do not overlap are not compared with each other."""
    buffer = np.zeros((2000, 2))
    (line,) = said(tmp_path, {"held": {"rows": list(buffer), "all": buffer}})
    assert line.startswith("extra.held/all: has memory in common with extra.held/rows.0, and will not")


def test_a_list_in_two_containers_is_named(tmp_path: Path) -> None:
    """Where it is listed itself, and where it is within another one."""
    episode: list[int] = []
    (line,) = said(tmp_path / "a", {"memory": [[1], (episode,)], "episode": episode})
    assert line == (
        "extra.memory/1.0: is the same list as extra.episode, and will not be after a restore; keep both in one dict "
        "and list that, where what is the same stays so"
    )
    (line,) = said(tmp_path / "b", {"one": {"x": episode}, "two": checkflow.Variables({"y": episode}, "y")})
    assert line.startswith("extra.two/y: is the same list as extra.one/x, and will not be after a restore; keep both")


def test_a_list_that_comes_to_be_in_two_is_named_once(tmp_path: Path) -> None:
    episode, memory = list[int](), list[list[int]]()

    def act(iteration: int) -> None:
        if iteration >= 2:
            memory.append(episode)

    (line,) = said(tmp_path, {"memory": memory, "episode": episode}, act, 9)
    assert "extra.memory/0: is the same list as extra.episode, and will not be after a restore; keep both" in line


def test_what_has_no_byte_in_common_is_not(tmp_path: Path) -> None:
    """Columns lie between each other; one array, one list in one container are restored as one; what cannot be changed
    may be anywhere."""
    table, row = np.zeros((3, 2)), np.zeros(2)
    episode, word, pair = [1], "a word that is nowhere else", (1, (2, "x"), frozenset({3}))
    columns = torch.zeros(3, 2)
    held = {"a": table[:, 0], "b": table[:, 1], "c": columns[:, 0], "d": columns[:, 1], "none": table[:0]}
    assert not said(
        tmp_path,
        {
            "held": held,
            "twice": {"one": row, "other": row, "list": episode, "memory": [episode, (episode,)]},
            "words": [word, pair, (), None, 7, 1 << 70, 0.5],
            "more": [word, pair, (), None, 7, 1 << 70, 0.5],
            "numbers": checkflow.Variables({"x": pair, "y": word}, "x", "y"),
        },
        lambda iteration: episode.append(iteration),
        5,
    )


def test_what_is_listed_twice_is_not(tmp_path: Path) -> None:
    """It is one, and is filled as one."""
    pool = [1]
    listed: Listed = {"one": pool, "two": pool}
    assert not said(tmp_path, listed, lambda _: pool.append(2), 2)
