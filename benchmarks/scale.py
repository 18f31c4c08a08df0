"""Llama-8B with AdamW on one machine: time and resident memory of tracing and planning it.

python benchmarks/scale.py [--model llama_8b] [--device h200] [--interval auto]
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="llama_8b")
    parser.add_argument("--device", default="h200")
    parser.add_argument("--optimizer", default="adamw")
    parser.add_argument("--interval", default="auto")
    chosen = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        command = [
            sys.executable, "-c", "from checkflow.cli import main; main()", "compile", chosen.model,
            "--batch-size", "1",
            "--set", f"optimizer={chosen.optimizer}", "--device", chosen.device, "--interval", chosen.interval,
            "--json", "-o", str(Path(folder, "schedule.json")),
        ]  # fmt: skip
        began = time.perf_counter()
        finished = subprocess.run(command, capture_output=True, text=True, check=True)
        wall_s = time.perf_counter() - began
    figures = json.loads(finished.stdout)
    resident_gib = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 2**20
    print(
        f"{chosen.model}, {chosen.optimizer}: state {figures['state_bytes'] / 1e9:.1f} GB in "
        f"{figures['state_tensors']} tensors, {figures['steps']} operators, interval {figures['interval']}, "
        f"{figures['chunks']} chunks, gap {figures['gap']:.1e}"
    )
    print(
        f"trace {figures['trace_s']:.1f} s, plan {figures['plan_s']:.2f} s, whole command {wall_s:.1f} s (target 120), "
        f"resident {resident_gib:.2f} GiB (target 4)"
    )


if __name__ == "__main__":
    main()
