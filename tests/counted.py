"""An optimizer whose algorithm keeps state under texts, as SPAM, MADGRAD and TRAC do, and a training that is killed:

    python counted.py STORE ITERATIONS [KILLED]

It says the digest of all that it is in the end, with STORE "" as without checkflow.
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from collections.abc import Iterable

import torch
import torch.nn.functional as F

import checkflow
from checkflow.store.trainer.persist_every import PersistEvery


class Counted(torch.optim.SGD):
    """Numbers and tensors, in place and anew, that the next update depends on; some are there from the first on."""

    def __init__(self, parameters: Iterable[torch.nn.Parameter]) -> None:
        super().__init__(list(parameters), lr=0.05, momentum=0.9)
        self.own["total"] = 0
        self.own["zero"] = torch.tensor(0)
        self.own["turned"] = torch.zeros(2, 3).t()

    @property
    def own(self) -> dict[str, object]:
        return self.state  # type: ignore[return-value]

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        own = self.own
        parameters = [p for group in self.param_groups for p in group["params"]]
        super().step()
        if "rate" not in own:
            own |= {"rate": 0.5, "in place": torch.ones(3), "anew": torch.zeros(2)}
            own["trust"] = {"n": -(2**70), "kind": ("a", [1, None, True]), "sum": torch.zeros(2, 2), 7: float("inf")}
            own["trust"] |= {p: p.clone() for p in parameters}  # type: ignore[operator]
        trust = own["trust"]
        for p in parameters:
            p.add_(trust[p], alpha=own["rate"] * 1e-3).add_(own["in place"].mean() * 1e-3)  # type: ignore
            trust[p].lerp_(p, 0.1)  # type: ignore[index]
        own["total"] += 1  # type: ignore[operator]
        own["rate"] = own["rate"] * 0.9 + 0.01 * own["total"]  # type: ignore[operator]
        own["zero"].add_(1)  # type: ignore[attr-defined]
        own["in place"].mul_(1.01).add_(own["zero"])  # type: ignore[attr-defined]
        own["turned"].add_(own["rate"])  # type: ignore[attr-defined]
        own["anew"] = own["anew"] + own["in place"][:2]  # type: ignore[index]
        trust["n"] += 1  # type: ignore[index]
        trust["sum"].add_(own["anew"])  # type: ignore[index]


def said_of(value: object, parameters: list[torch.nn.Parameter]) -> object:
    """To the bit."""
    if isinstance(value, torch.Tensor):
        known = [number for number, p in enumerate(parameters) if p is value]
        data = value.detach().contiguous().reshape(-1).view(torch.uint8).tolist()
        return known or (str(value.dtype), tuple(value.shape), value.stride(), data)
    if isinstance(value, dict):
        return [(said_of(key, parameters), said_of(item, parameters)) for key, item in value.items()]
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [said_of(item, parameters) for item in value]
    return repr(value)


def main(store: str, iterations: int, killed: int = 0) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
    optimizer = Counted(model.parameters())

    def iterate(number: int) -> None:
        generator = torch.Generator().manual_seed(number)
        x, y = torch.randn(4, 6, generator=generator), torch.randint(3, (4,), generator=generator)
        torch.autograd.backward(F.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()

    if not store:
        for number in range(iterations):
            iterate(number)
    else:
        with checkflow.attach(
            model, optimizer, store=store, when_full="wait", persist_every=PersistEvery(iterations=1)
        ) as ckpt:
            for number in range(ckpt.restore(), iterations):
                iterate(number)
                ckpt.step()
                if number + 1 == killed:
                    os.kill(os.getpid(), signal.SIGKILL)
    parameters = list(model.parameters())
    own = {key: value for key, value in optimizer.own.items() if type(key) is str}
    everything = [[p.detach() for p in parameters], [optimizer.state[p] for p in parameters], own]
    sys.stdout.write(hashlib.sha256(repr(said_of(everything, parameters)).encode()).hexdigest())


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
