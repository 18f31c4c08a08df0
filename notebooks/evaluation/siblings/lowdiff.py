"""LowDiff: what its Equation 8 gives, Table I beside it, Table III's bytes, and why gradients cannot be added up."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from scipy.optimize import nnls

from evaluation.table import Table

TABLE_I = {  # normalized wasted time: by iterations from one full checkpoint to the next, for 1 to 6 gradients a write
    10: (1.258, 1.226, 1.279, 1.330, 1.408, 1.513),
    20: (1.052, 1.000, 1.031, 1.085, 1.149, 1.202),
    50: (1.394, 1.290, 1.255, 1.312, 1.387, 1.481),
    100: (1.916, 1.783, 1.712, 1.752, 1.869, 1.952),
}
PARAMETERS = {  # Table II(b), millions
    "ResNet-101": 44.5, "VGG-19": 143.7, "BERT-B": 110, "BERT-L": 334, "GPT2-S": 117, "GPT2-L": 762,
}  # fmt: skip
TABLE_III = {  # MiB: a full checkpoint, and a gradient compressed to 1%
    "ResNet-101": (511, 34), "VGG-19": (1.7 * 1024, 109), "BERT-B": (1.3 * 1024, 82), "BERT-L": (3.8 * 1024, 239),
    "GPT2-S": (1.4 * 1024, 92), "GPT2-L": (8.7 * 1024, 541),
}  # fmt: skip
GAP_H = {2.0: 0.061, 0.5: 0.145}  # Figure 14: to Gemini, by mean time between failures
EFFECTIVE = {"LowDiff": 0.921, "LowDiff+": 0.933}  # Figure 19, at 0.3 h


@dataclass(frozen=True, slots=True)
class Costs:
    """Of Equation 8, with time in iterations, so that its two terms for a batch are of one unit."""

    merge: float  # R_D: to make one delta part of the state
    write: float  # S / W: of a full checkpoint
    mtbf: float  # M

    def wasted(self, frequency: float, batch: float) -> float:
        """Equation 8 without R_F, for each device and each unit of time."""
        recovery = batch / 2 + self.merge / 2 * (1 / (frequency * batch) - 1)
        return recovery / self.mtbf + self.write * frequency

    def best(self) -> tuple[float, float]:
        """Equation 10: full checkpoints an iteration, and gradients a write."""
        return (
            (self.merge / (4 * self.write**2 * self.mtbf**2)) ** (1 / 3),
            (2 * self.write * self.merge * self.mtbf) ** (1 / 3),
        )


Terms = Callable[[int, int], tuple[float, ...]]  # of iterations between full checkpoints, and gradients a write


def of_equation_8(full: int, batch: int) -> tuple[float, ...]:
    """Its terms, whose weights are what the paper does not say of its constants."""
    return 1.0, batch, full / batch, 1 / full


def of_separate_costs(full: int, batch: int) -> tuple[float, ...]:
    """The reasons that the text gives: half a batch is lost, each write costs; half of `full` is merged, each costs."""
    return 1.0, batch, 1 / batch, full, 1 / full


@dataclass(frozen=True, slots=True)
class Fit:
    """Terms through Table I, weighted by least squares, no weight below 0."""

    cells: dict[int, tuple[float, ...]]
    worst: float  # the largest difference, a fraction of the paper's cell

    @property
    def least(self) -> tuple[int, int]:
        """Where the fit is least: iterations between full checkpoints, gradients a write."""
        return min(
            ((full, batch) for full, row in self.cells.items() for batch in range(1, len(row) + 1)),
            key=lambda at: self.cells[at[0]][at[1] - 1],
        )


def fit(terms: Terms) -> Fit:
    at = [(full, batch) for full, row in TABLE_I.items() for batch in range(1, len(row) + 1)]
    paper = np.array([TABLE_I[full][batch - 1] for full, batch in at])
    matrix = np.array([terms(*one) for one in at])
    weights, _ = nnls(matrix, paper)
    found = matrix @ weights
    cells = {
        full: tuple(float(value) for (of, _), value in zip(at, found, strict=True) if of == full) for full in TABLE_I
    }
    return Fit(cells, float(np.max(np.abs(found / paper - 1))))


def table_i(fitted: Fit) -> Table:
    rows = [
        (str(full), *(f"{paper:.3f} / {ours:.3f}" for paper, ours in zip(row, fitted.cells[full], strict=True)))
        for full, row in TABLE_I.items()
    ]
    return Table(("full each", *(f"{batch} a write" for batch in range(1, 7))), tuple(rows))


def table_iii() -> Table:
    """12 bytes a parameter; and 80 for each of a gradient that is kept, which one in a hundred is."""
    rows = []
    for name, (full, delta) in TABLE_III.items():
        count = PARAMETERS[name] * 1e6
        ours_full, ours_delta = 12 * count / 2**20, 0.8 * count / 2**20
        rows.append(
            (name, f"{full:.0f}", f"{ours_full:.0f}", f"{ours_full / full - 1:+.1%}", f"{delta}", f"{ours_delta:.0f}",
             f"{ours_delta / delta - 1:+.1%}", f"{4 * count / 2**20:.0f}")
        )  # fmt: skip
    headings = ("network", "full, MiB", "12 Ψ", "", "delta, MiB", "0.8 Ψ", "", "gradient as it is")
    return Table(headings, tuple(rows))


def gap_exponent() -> float:
    """How Figure 14's gap grows as failures do: gap ~ M^-x."""
    (long_h, low), (short_h, high) = GAP_H.items()
    return math.log(high / low) / math.log(long_h / short_h)


def lost_to_a_failure_s(effective: float, mtbf_h: float) -> float:
    """What each failure costs, all together, where so much of the time is effective."""
    return (1 - effective) * mtbf_h * 3600


def adam_of_a_sum(steps: int = 4, size: int = 1000) -> tuple[float, float]:
    """How far one step of Adam on the sum of gradients is from the steps on each, and how far those go; medians."""

    def stepped(gradients: list[torch.Tensor]) -> torch.Tensor:
        parameter = torch.zeros(size, requires_grad=True)
        optimizer = torch.optim.Adam([parameter])
        for gradient in gradients:
            parameter.grad = gradient.clone()
            optimizer.step()
        return parameter.detach()

    drift = torch.randn(size, generator=torch.Generator().manual_seed(0))
    noise = torch.Generator().manual_seed(1)
    gradients = [drift + 0.1 * torch.randn(size, generator=noise) for _ in range(steps)]
    each, at_once = stepped(gradients), stepped([torch.stack(gradients).sum(0)])
    return float((each - at_once).abs().median()), float(each.abs().median())
