"""checkflow demo: from a training script to a verified schedule, with the commands that do it."""

from __future__ import annotations

import shlex
import tempfile
from pathlib import Path

import click

from checkflow.cli import _console, run
from checkflow.errors import EXIT_DONE

SCRIPT = '''\
"""A training script as a user has it; checkflow needs only the function at its end."""

import torch
from torch import nn

import checkflow


def training(batch_size: int = 64) -> checkflow.Training:
    model = nn.Sequential(
        nn.Conv2d(3, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(4),
        nn.Conv2d(64, 128, 3, padding=1), nn.BatchNorm2d(128), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
        nn.Flatten(), nn.Linear(2048, 4096), nn.ReLU(), nn.Linear(4096, 1000),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    images, labels = torch.randn(batch_size, 3, 128, 128), torch.randint(1000, (batch_size,))

    def iteration():
        loss = nn.functional.cross_entropy(model(images), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return checkflow.Training(model, optimizer, iteration)
'''


@click.command()
def command() -> int:
    """Compile a training script, verify the schedule, and compile a bundled network whose link is too slow."""
    with tempfile.TemporaryDirectory(prefix="checkflow-demo-") as name:
        folder = Path(name)
        (folder / "train.py").write_text(SCRIPT)
        _console.out.print(f"A training script, {folder / 'train.py'}:\n", soft_wrap=True)
        _console.out.print("".join(f"    {line}" for line in SCRIPT.splitlines(keepends=True)), markup=False)
        script, graph, schedule = (str(folder / name) for name in ("train.py", "graph.json", "schedule.json"))
        for arguments in (
            ["trace", script, "-o", graph],
            ["compile", graph, "-o", schedule],
            ["verify", schedule, graph],
        ):
            if code := _do(arguments):
                return code
        too_slow = ["compile", "bert", "--batch-size", "1", "--set", "optimizer=adamw", "-o", schedule]
        _do(too_slow)
        return _do([*too_slow, "--interval", "auto"])


def _do(arguments: list[str]) -> int:
    _console.out.print(f"\n$ checkflow {shlex.join(arguments)}", style="bold", soft_wrap=True, markup=False)
    code = run(arguments)
    if code != EXIT_DONE:
        _console.out.print(f"(exit code {code})", markup=False)
    return code
