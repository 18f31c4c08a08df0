"""The sibling papers' figures come out of their own models where the page says so, and not where it says not."""

from __future__ import annotations

from pathlib import Path

import pytest
from evaluation.siblings import checkfreq, gockpt, lowdiff, ours
from evaluation.siblings.checkfreq import Mode, Profile

from checkflow.graphfile import read_graph
from checkflow.hardware import load_profile


def test_checkfreq_s_example_is_twenty() -> None:
    """A checkpoint that costs an iteration, at 5%; with a copy that costs nothing the mode is the GPU's."""
    profile = Profile(iteration=1, update=0.1, gpu_copy=2, cpu_copy=1.9, write=5, has_room=True)
    assert checkfreq.frequency(profile, 0.05) == (20, Mode.CPU)
    free = Profile(iteration=1, update=0.1, gpu_copy=0, cpu_copy=1.9, write=5, has_room=True)
    assert checkfreq.frequency(free, 0.05) == (7, Mode.GPU)  # until the one before is written
    assert checkfreq.frequency(Profile(1, 0.1, 0, 1.9, 5, has_room=False), 0.05)[1] is Mode.CPU


def test_table_5_follows_from_its_first_two_columns() -> None:
    """19 iterations, and no more overhead than is allowed."""
    found = checkfreq.contended()
    assert found.interval == 19
    assert found.overhead(14) == pytest.approx(0.35)
    assert found.overhead(19) < checkfreq.BUDGET < found.overhead(17)


def test_table_6_is_a_whole_interval() -> None:
    """For four of the five networks, within a quarter; half of one is not."""
    whole = {name: 2 * epoch_s / checkfreq.PER_EPOCH[name] for name, (epoch_s, _) in checkfreq.TABLE_6B.items()}
    near = [name for name, (_, paper_s) in checkfreq.TABLE_6B.items() if abs(whole[name] / paper_s - 1) < 0.25]
    assert sorted(near) == ["ResNet18", "ResNet50", "ResNext101", "VGG16"]
    assert checkfreq.kept(checkfreq.epoch_for(0.5, 5), 5) == pytest.approx(0.5)


def test_equation_10_is_the_least_of_equation_8() -> None:
    """Nothing near it wastes less."""
    costs = lowdiff.Costs(merge=3.0, write=8.0, mtbf=2000.0)
    frequency, batch = costs.best()
    for by in (0.9, 1.1):
        assert costs.wasted(frequency * by, batch) > costs.wasted(frequency, batch)
        assert costs.wasted(frequency, batch * by) > costs.wasted(frequency, batch)


def test_table_i_is_what_the_text_says_and_not_equation_8() -> None:
    """Its least cell comes out of separate costs of a batch and of a full checkpoint."""
    separate, equation = lowdiff.fit(lowdiff.of_separate_costs), lowdiff.fit(lowdiff.of_equation_8)
    assert separate.least == (20, 2)
    assert separate.worst < 0.12 < 0.2 < equation.worst


def test_table_iii_is_bytes_a_parameter() -> None:
    """Within 7% and 8%."""
    for name, (full, delta) in lowdiff.TABLE_III.items():
        count = lowdiff.PARAMETERS[name] * 1e6 / 2**20
        assert abs(12 * count / full - 1) < 0.07 and abs(0.8 * count / delta - 1) < 0.08


def test_one_step_on_a_sum_is_another_state() -> None:
    """As far from it, nearly, as the steps go."""
    difference, way = lowdiff.adam_of_a_sum()
    assert 0.7 * way < difference < way


def test_the_best_intervals_come_out() -> None:
    for save_s, interval, _ in gockpt.TABLE_1.values():
        assert abs(gockpt.best_interval(save_s) - interval) < 1


def test_three_steps_are_saved_at_most() -> None:
    """Not four: at seven steps or eight. And Figure 6's range is that of four to six."""
    saved = {steps: gockpt.stalls(steps)[0] - gockpt.stalls(steps)[1] for steps in range(2, 20)}
    assert max(saved.values()) == saved[7] == saved[8] == 3.0
    less = [1 - gockpt.stalls(steps)[1] / gockpt.stalls(steps)[0] for steps in (4, 5, 6)]
    assert less[0] == pytest.approx(gockpt.FIG_6[1], abs=0.02) and less[2] == pytest.approx(gockpt.FIG_6[0], abs=0.02)


def test_ours_are_drawn() -> None:
    """A line for each policy, and what is chosen."""
    graph = read_graph(Path(__file__).parents[2] / "graphs" / "alexnet-32.json")
    points = ours.compared(graph, load_profile("rtx3090"), (0.5, 5))
    assert len(ours.table(points).rows) == 2
    assert ours.draw(points, "title").axes
