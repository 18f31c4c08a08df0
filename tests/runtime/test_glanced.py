"""A few words of a gradient's bytes, by which a write that no counter tells of is seen."""

from __future__ import annotations

import pytest
import torch

from checkflow.runtime.sampled import few_of

SIZES = [1, 3, 4, 7, 8, 500, 508, 511, 512, 600, 764, 768, 1024, 4096, 100_001]


@pytest.mark.parametrize("size", SIZES)
def test_the_same_words_are_seen_wherever_the_bytes_lie(size: int) -> None:
    data = torch.randint(256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(size))
    for turn in (0, 1, 77):
        few = few_of(data, turn)
        for shift in range(1, 9):
            elsewhere = torch.zeros(size + shift, dtype=torch.uint8)[shift:]
            elsewhere.copy_(data)
            assert torch.equal(few_of(elsewhere, turn), few)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_what_writes_all_of_it_is_seen_in_each_turn(size: int, dtype: torch.dtype) -> None:
    for turn in range(20):
        gradient = torch.rand(size, dtype=dtype, generator=torch.Generator().manual_seed(turn)) + 0.5
        before = few_of(gradient.view(torch.uint8), turn).clone()
        gradient.mul_(0.5)
        assert not torch.equal(few_of(gradient.view(torch.uint8), turn), before)


def test_each_word_has_its_turn() -> None:
    words = torch.arange(1000, dtype=torch.int32)
    seen = {int(word) for turn in range(60) for word in few_of(words.view(torch.uint8), turn)}
    assert seen == set(range(1000))
