"""The paper's integer program, Eqs 1-12, literally: C, P, S and alpha for each chunk and step, a function an equation.

"Checkflow: Low-Overhead Checkpointing for Deep Learning Training", section III-A. Two liberties, both exact: bytes are
counted in units of the sizes' common divisor, and peak_mem from the training peak up. One addition, S(e,1) = 0, since
Eq 7 begins at t = 2. Of Eq 8 only the rows with u(e,t) = 1 at the first write say anything, and only they are made;
for a first write at step 1, which Eq 8 skips, the row is made as well and cannot hold.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from types import MappingProxyType

import numpy as np
import scipy.sparse as sp

from checkflow.plan import Chunk, Problem, Transfer, unrolled
from checkflow.plan.packed.program import Floats, Integers, Program, in_time
from checkflow.plan.packed.steps import Model, capacity_bytes, resident_bytes


@dataclass(frozen=True)
class Rows:
    """Some rows of the matrix: lower <= values <= upper."""

    matrix: sp.csr_array
    lower: Floats
    upper: Floats


@dataclass(frozen=True)
class Literal:
    """The symbols of section III-A. Chunk e and step t stand at index e·T + (t - 1) of each of the four blocks."""

    steps: int  # |T|, over all iterations of the interval
    size: Integers  # η(e), in units: (chunks,)
    first_write: Integers  # the first t with u(e,t) = 1: (chunks,)
    capacity: Integers  # ⌊B·τ_t⌋ in units: (steps,)
    headroom: Floats  # training peak minus Σ l·η at t, in units: (steps,)

    @property
    def chunks(self) -> int:
        return len(self.size)

    @property
    def pairs(self) -> int:
        return self.chunks * self.steps

    @property
    def columns(self) -> int:
        return 4 * self.pairs + 1  # C, P, S, alpha; peak_mem

    def block(self, letter: str, chunk: Integers, step: Integers) -> Integers:
        """Columns of C, P, S or A(lpha) for these chunks and steps (from 1)."""
        return "CPSA".index(letter) * self.pairs + chunk * self.steps + step - 1

    def grid(self, first_step: int = 1) -> tuple[Integers, Integers]:
        """(chunk, step) of all pairs with step >= first_step."""
        chunk, step = np.meshgrid(np.arange(self.chunks), np.arange(first_step, self.steps + 1), indexing="ij")
        return chunk.ravel(), step.ravel()

    def rows(self, count: int, lower: float, upper: float, *terms: tuple[Integers, Integers, float]) -> Rows:
        """`count` rows with equal sides from (row, column, coefficient) terms."""
        row = np.concatenate([term[0] for term in terms])
        column = np.concatenate([term[1] for term in terms])
        value = np.concatenate([np.full(len(term[0]), term[2]) for term in terms])
        matrix = sp.csr_array((value, (row, column)), shape=(count, self.columns))
        return Rows(matrix, np.full(count, lower), np.full(count, upper))


def eq1(m: Literal) -> tuple[Floats, Floats, np.ndarray[tuple[int], np.dtype[np.bool_]]]:
    """C, P, S (and alpha) are binary; peak_mem is free above the training peak. Lower, upper, integral."""
    binary = np.arange(m.columns) < m.columns - 1
    return np.zeros(m.columns), np.where(binary, 1.0, np.inf), binary


def eq2(m: Literal) -> Rows:
    """C(e,t) + P(e,t) + S(e,t) <= 1."""
    e, t = m.grid()
    row = np.arange(m.pairs)
    return m.rows(m.pairs, -np.inf, 1.0, *((row, m.block(letter, e, t), 1.0) for letter in "CPS"))


def _after(m: Literal, letter: str) -> Rows:
    """letter(e,t) - C(e,t-1) - P(e,t-1) <= 0 for t >= 2."""
    e, t = m.grid(2)
    row = np.arange(len(e))
    return m.rows(
        len(e),
        -np.inf,
        0.0,
        (row, m.block(letter, e, t), 1.0),
        (row, m.block("C", e, t - 1), -1.0),
        (row, m.block("P", e, t - 1), -1.0),
    )


def eq3(m: Literal) -> Rows:
    """P(e,t) <= C(e,t-1) + P(e,t-1), t >= 2."""
    return _after(m, "P")


def eq4(m: Literal) -> Rows:
    """Σ_t S(e,t) = Σ_t C(e,t) = 1."""
    e, t = m.grid()
    offload, create = (e, m.block("S", e, t), 1.0), (m.chunks + e, m.block("C", e, t), 1.0)
    return m.rows(2 * m.chunks, 1.0, 1.0, offload, create)


def eq5(m: Literal) -> Rows:
    """P(e,1) = 0."""
    e = np.arange(m.chunks)
    return m.rows(m.chunks, 0.0, 0.0, (e, m.block("P", e, np.ones_like(e)), 1.0))


def eq6(m: Literal) -> Rows:
    """C(e,t) <= l(e,t), which is 1: state is resident throughout."""
    e, t = m.grid()
    return m.rows(m.pairs, -np.inf, 1.0, (np.arange(m.pairs), m.block("C", e, t), 1.0))


def eq7(m: Literal) -> Rows:
    """S(e,t) <= C(e,t-1) + P(e,t-1), t >= 2."""
    return _after(m, "S")


def first_step(m: Literal) -> Rows:
    """S(e,1) = 0: nothing can be offloaded before it was created. Added; Eq 7 does not reach t = 1."""
    e = np.arange(m.chunks)
    return m.rows(m.chunks, 0.0, 0.0, (e, m.block("S", e, np.ones_like(e)), 1.0))


def eq8(m: Literal) -> Rows:
    """Σ_{t' < t} C(e,t') >= u(e,t) at the first t with u(e,t) = 1."""
    e, t = m.grid()
    before = t < m.first_write[e]
    return m.rows(m.chunks, 1.0, np.inf, (e[before], m.block("C", e, t)[before], 1.0))


def eq9(m: Literal) -> Rows:
    """Σ_e S(e,t)·η(e) <= B·τ_t."""
    e, t = m.grid()
    matrix = sp.csr_array((m.size[e].astype(np.float64), (t - 1, m.block("S", e, t))), shape=(m.steps, m.columns))
    return Rows(matrix, np.full(m.steps, -np.inf), m.capacity.astype(np.float64))


def eq10(m: Literal) -> Rows:
    """peak_mem >= Σ_e alpha(e,t)·η(e) + Σ l(e,t)·η(e)."""
    e, t = m.grid()
    value = np.concatenate((m.size[e].astype(np.float64), np.full(m.steps, -1.0)))
    row = np.concatenate((t - 1, np.arange(m.steps)))
    column = np.concatenate((m.block("A", e, t), np.full(m.steps, m.columns - 1)))
    matrix = sp.csr_array((value, (row, column)), shape=(m.steps, m.columns))
    return Rows(matrix, np.full(m.steps, -np.inf), m.headroom)


def eq11(m: Literal) -> Rows:
    """alpha(e,t) >= C(e,t), >= P(e,t), >= S(e,t)."""
    e, t = m.grid()
    terms = []
    for place, letter in enumerate("CPS"):
        row = place * m.pairs + np.arange(m.pairs)
        terms += [(row, m.block("A", e, t), 1.0), (row, m.block(letter, e, t), -1.0)]
    return m.rows(3 * m.pairs, 0.0, np.inf, *terms)


def eq12(m: Literal) -> Floats:
    """Minimize peak_mem."""
    return np.concatenate((np.zeros(m.columns - 1), np.ones(1)))


def build(problem: Problem, chunks: tuple[Chunk, ...], deadline: float = math.inf) -> Model:
    """Eqs 1-12 for these chunks; with an interval k the iteration stands k times in a row.

    Raises OutOfTime where time.monotonic() passes the deadline: the rows of a large model take longer than some limits.
    """
    problem = unrolled(problem)
    unit = math.gcd(*(chunk.size_bytes for chunk in chunks)) or 1
    base = problem.training_peak_bytes
    m = Literal(
        steps=problem.steps,
        size=np.array([chunk.size_bytes // unit for chunk in chunks], dtype=np.int64),
        first_write=np.array([problem.state[chunk.state].first_write for chunk in chunks], dtype=np.int64),
        capacity=capacity_bytes(problem) // unit,
        headroom=(base - resident_bytes(problem)) / unit,
    )
    lower, upper, integral = eq1(m)
    named = {}
    for function in (eq2, eq3, eq4, eq5, eq6, eq7, first_step, eq8, eq9, eq10, eq11):
        in_time(deadline)
        named[function.__name__] = function(m)
    ends = np.cumsum([len(rows.lower) for rows in named.values()]).tolist()
    program = Program(
        objective=eq12(m),
        lower=lower,
        upper=upper,
        integral=integral,
        matrix=sp.csr_array(sp.vstack([rows.matrix for rows in named.values()], format="csr")),
        row_lower=np.concatenate([rows.lower for rows in named.values()]),
        row_upper=np.concatenate([rows.upper for rows in named.values()]),
        families=MappingProxyType(
            {name: slice(end - len(rows.lower), end) for (name, rows), end in zip(named.items(), ends, strict=True)}
        ),
    )
    return Model(program, base, unit, lambda x: _decode(m, chunks, x), lambda transfers: _encode(m, chunks, transfers))


def _decode(m: Literal, chunks: tuple[Chunk, ...], x: Floats) -> tuple[Transfer, ...]:
    """The intervals create < offload that C and S say, in link order."""
    create, _, offload, _ = x[:-1].reshape(4, m.chunks, m.steps)
    created, sent = create.argmax(axis=1) + 1, offload.argmax(axis=1) + 1
    found = [Transfer(chunk, int(c), int(s), int(s)) for chunk, c, s in zip(chunks, created, sent, strict=True)]
    return tuple(sorted(found, key=lambda transfer: transfer.start))


def _encode(m: Literal, chunks: tuple[Chunk, ...], transfers: tuple[Transfer, ...]) -> Floats:
    """All of C, P, S, alpha and peak_mem for a plan's transfers."""
    place = {chunk: e for e, chunk in enumerate(chunks)}
    x = np.zeros(m.columns)
    create, preserve, offload, alpha = x[:-1].reshape(4, m.chunks, m.steps)
    for transfer in transfers:
        e, created = place[transfer.chunk], transfer.snapshot
        assert created is not None  # the paper's plans are all snapshots
        create[e, created - 1] = offload[e, transfer.start - 1] = 1.0
        preserve[e, created : transfer.start - 1] = 1.0
        alpha[e, created - 1 : transfer.start] = 1.0
    x[-1] = max(0.0, float(np.max(m.size @ alpha - m.headroom, initial=0.0)))
    return x
