"""checkflow profile: measure this machine and write its device profile."""

from __future__ import annotations

from pathlib import Path

import click
import torch

from checkflow import hardware
from checkflow.cli import _console
from checkflow.cli._options import OutputPath
from checkflow.errors import EXIT_DONE, InputError
from checkflow.hardware.measure import measure_profile
from checkflow.jsonfile import check_outputs
from checkflow.units import format_rate


@click.command()
@click.option("-o", "--output", type=OutputPath(), default=Path("here.yaml"), show_default=True)
@click.option("--name", default="here", show_default=True, help="The profile's name in reports.")
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
def command(output: Path, name: str, device: str) -> int:
    """Measure arithmetic, memory, launch latency and link of this machine, for --device FILE."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise InputError("--device cuda: this machine has no CUDA device; use --device cpu")
    check_outputs((), output)
    with _console.progress() as progress:
        profile = measure_profile(name, device, progress=progress)
        hardware.write_profile(output, profile)
    _console.say(
        f"{output}: link {format_rate(profile.link_bandwidth_bytes_per_s)}, memory "
        f"{format_rate(profile.memory_bandwidth_bytes_per_s)}, launch latency {profile.launch_latency_ns} ns"
    )
    return EXIT_DONE
