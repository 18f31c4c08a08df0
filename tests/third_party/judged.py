"""A program that judges four trainings whose verdicts are known, and prints them as JSON: judged.py FOLDER.

They are written to a package of their own beside those of benchmarks/third_parties/packages.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "benchmarks"))

from third_parties import packages
from third_parties.case import cases_of
from third_parties.judge import Limits, judge

KNOWN = '''
import time

import torch
from torch import nn

from third_parties.case import Case, trained

COUNT = [0]


def net():
    torch.manual_seed(0)
    return nn.Linear(4, 4)


def sound():
    model = net()
    return trained(model, lambda: model(torch.randn(2, 4)).square().mean())


def forgetful():
    """What it adds depends on a count that nobody restores."""
    model = net()

    def loss():
        COUNT[0] += 1
        return model(torch.randn(2, 4)).square().mean() * COUNT[0]

    return trained(model, loss)


def refused():
    model = net()
    loss = lambda: model(torch.randn(2, 4)).square().mean()
    return trained(model, loss, torch.optim.SGD([nn.Parameter(torch.zeros(3))], lr=0.1))


def endless():
    model = net()

    def loss():
        if type(torch.zeros(1)) is not torch.Tensor:  # under fake tensors only
            time.sleep(100)
        return model(torch.randn(2, 4)).square().mean()

    return trained(model, loss)


CASES = tuple(Case(build.__name__, build) for build in (sound, forgetful, refused, endless))
'''

LIMITS_S = {"endless": 5.0}


def main(folder: Path) -> None:
    (folder / "known.py").write_text(KNOWN)
    packages.__path__.append(str(folder))
    rows = [
        judge("known", case, folder / case.name, Limits(LIMITS_S.get(case.name, 120.0), 2**34), 0, kill=True)
        for case in cases_of("known")
    ]
    verdicts = {row.case: [row.verdict, row.reason, row.killed] for row in rows}
    for case in cases_of("known")[:2]:
        row = judge("known", case, folder / case.name, Limits(120.0, 2**34), 0, kill=True, learned=True)
        verdicts[f"{row.case}, learned"] = [row.verdict, row.reason, row.learned_in > 0]
    print(json.dumps(verdicts))  # noqa: T201


if __name__ == "__main__":
    main(Path(sys.argv[1]))
