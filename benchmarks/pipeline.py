"""The numbers behind the promises of the README, measured in one run on two CPU ranks.

    python benchmarks/pipeline.py [--json benchmarks/results/pipeline.json]

The tests assert bounds on the same quantities; this prints what they are.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent / "tests" / "support"))

from launching import make_task, ranks
from paths import SUPPORT


def relative(ours: float, theirs: float) -> float:
    """Difference over the size of the second."""
    return abs(ours - theirs) / abs(theirs)


def measure(folder: Path) -> dict[str, Any]:
    """Every number by name."""
    (alone,) = ranks(1, "zero3", folder)
    pair = ranks(2, "zero3", folder)
    rows = [[row for seen in pair for row in seen["rollouts"][step]] for step in range(2)]
    same = [[row[1] for row in ours] == [row[1] for row in alone["rollouts"][i]] for i, ours in enumerate(rows)]
    first, second = ranks(2, "switch", folder)
    losses = ranks(2, "losses", folder, programs="engine_programs.py")
    (export, _) = ranks(2, "export", folder)
    head = subprocess.run([sys.executable, SUPPORT / "head_memory.py"], capture_output=True, text=True, check=True)
    share, worst = map(float, head.stdout.split())

    def layout(name: str) -> float:
        return max(relative(pair[0]["metrics"][i][name], alone["metrics"][i][name]) for i in range(2))

    return {
        "completions of two steps compared": sum(map(len, rows)),
        "rollouts identical on 1 and 2 ranks": all(same) and [t for s in pair for t in s["greedy"]] == alone["greedy"],
        "loss, 1 against 2 ranks, relative": layout("policy/loss"),
        "gradient norm, 1 against 2 ranks, relative": layout("policy/grad_norm"),
        "sampler against training forward, largest gap in nats": max(
            metrics["parity/logp_abs_diff_max"] for metrics in alone["metrics"]
        ),
        "collectives between gather and release": sum(first["inside"].values()) + sum(second["inside"].values()),
        "collectives to release": sum(first["release"].values()),
        "a rank decodes when the other is done": first["in_turn"] and second["in_turn"],
        "10 losses bit-identical with generation between": all(seen["with"] == seen["without"] for seen in losses),
        "reference against starting policy, largest gap in nats": export["reference"],
        "exported model decodes to the bit what the policy does": export["exported"],
        "peak memory of loss and backward over the logits' bytes (V 151936, N 4096)": share,
        "its gradients against the plain ones, relative": worst,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        numbers = measure(make_task(Path(folder)))
    for name, value in numbers.items():
        print(f"{name:76} {value:.3g}" if isinstance(value, float) else f"{name:76} {value}")
    if arguments.json:
        machine = {
            "cores": os.cpu_count(),
            "python": platform.python_version(),
            **{package: version(package) for package in ("torch", "deepspeed", "transformers")},
        }
        arguments.json.write_text(json.dumps({"machine": machine, "numbers": numbers}, indent=2) + "\n")


if __name__ == "__main__":
    main()
