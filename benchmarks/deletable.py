"""Whether every feature can be taken out: deletes each in a copy of the tree, and checks and trains what is left.

    python benchmarks/deletable.py [--together] [FEATURE ...]

The copy lacks the feature's folder, its tests, its page and its registered entry. Lint, types, layers, the tests that
start no processes and three steps of the quickstart must still pass. `left` names the files beyond these that failed,
which would have to be touched: 0 where the feature is a folder.
"""

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
REGISTRATION = "hybrid_grpo/config/features.py"
CHECKS = {
    "lint": ["ruff", "check", "."],
    "types": ["mypy"],
    "layers": ["lint-imports"],
    "tests": [
        *(sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "-p", "no:cacheprovider"),
        *("-m", "not (ranks or process or gpu)"),
    ],
    "quickstart": ["bash", "training_scripts/quickstart.sh", "--toy", "--run.steps", "3"],
}


def registered() -> dict[str, str]:
    """The registered entry of every feature, by its folder."""
    entries = re.search(r"^REGISTERED: tuple\[str, ...\] = \((.*?)\)$", (ROOT / REGISTRATION).read_text(), re.M | re.S)
    assert entries is not None
    return {entry.partition(":")[0]: entry for entry in re.findall(r'"([\w:]+)"', entries[1])}


def copy_without(features: dict[str, str], folder: Path) -> None:
    """The tracked files of this tree without those of the features, of which the registered entries are given."""
    names = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    gone: list[str] = []
    for feature in features:
        settings = (ROOT / f"hybrid_grpo/features/{feature}/settings.py").read_text()
        gone += [f"hybrid_grpo/features/{feature}/", f"tests/features/{feature}/"]
        gone += re.findall(r'^    page = "(.+)"$', settings, re.M)
    for name in names:
        if name and not name.startswith(tuple(gone)) and (ROOT / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, folder / name)
    registration = folder / REGISTRATION
    text = registration.read_text()
    for entry in features.values():
        text, count = re.subn(rf' *"{entry}",\n', "", text)
        assert count == 1, f"{entry} is registered {count} times"
    registration.write_text(text)


def measure(features: dict[str, str]) -> dict[str, object]:
    """Which checks pass without these features, and which files the others name."""
    what = ", ".join(features)
    found: dict[str, object] = {"feature": what}
    left: set[str] = set()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "tree"
        copy_without(features, folder)
        environment = {**os.environ, "PYTHONPATH": str(folder), "SKIP_SETUP": "1", "RUNS": f"{name}/runs"}
        for check, command in CHECKS.items():
            start = time.monotonic()
            ran = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
            found[check], found[f"{check}_s"] = ran.returncode == 0, round(time.monotonic() - start, 1)
            if ran.returncode:
                lines = [
                    line for line in ran.stdout.splitlines() if re.match(r"\s*-->|FAILED|ERROR|\S+:\d+: error", line)
                ]
                left |= set(re.findall(r"[\w/]+\.(?:py|md|yaml)", " ".join(lines)))
                print(f"{what}: {check}\n{ran.stdout[-2000:]}{ran.stderr[-1000:]}", file=sys.stderr)
    found["left"] = sorted(left)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("features", nargs="*")
    parser.add_argument("--together", action="store_true", help="take them out of one copy, all at once")
    given = parser.parse_args()
    entries = registered()
    chosen = {name: entries[name] for name in given.features or entries}
    results = [measure(chosen)] if given.together else [measure({name: entry}) for name, entry in chosen.items()]
    for result in results:
        print(json.dumps(result))
    return 0 if all(result[check] for result in results for check in CHECKS) else 1


if __name__ == "__main__":
    sys.exit(main())
