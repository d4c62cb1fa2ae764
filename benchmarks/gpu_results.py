"""The results of gpu.sh: part after part into one file, and a table of them.

    python benchmarks/gpu_results.py FOLDER has PART            # exit status: whether it is there and did not fail
    python benchmarks/gpu_results.py FOLDER add PART SECONDS    # from FOLDER/gpu/PART.json, or .xml of pytest
    python benchmarks/gpu_results.py FOLDER fail PART           # with the end of FOLDER/gpu/PART.log
    python benchmarks/gpu_results.py FOLDER table               # prints FOLDER/gpu.md, which is written after each part

The environment variables MACHINE and COMMIT identify the numbers; parts of other machines or commits count as not done.
"""

import json
import os
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree


class Results:
    """The file gpu.json in a folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.path = folder, folder / "gpu.json"
        self.parts: dict[str, Any] = json.loads(self.path.read_text())["parts"] if self.path.exists() else {}
        self.origin = {"machine": os.environ["MACHINE"], "commit": os.environ["COMMIT"]}

    def has(self, name: str) -> bool:
        """Whether the part was done on this machine and commit, and did not fail."""
        part = self.parts.get(name, {})
        return part.items() >= self.origin.items() and "failed" not in part

    def add(self, name: str, seconds: str) -> None:
        """Read the results of a part; one that only prepares another has none."""
        self._write(name, {"seconds": int(seconds), "results": self._left(name)})

    def fail(self, name: str) -> None:
        """Record the last line of a part's output, beside what it had measured by then."""
        log = (self.folder / "gpu" / f"{name}.log").read_text(errors="replace")
        said = [line.strip() for line in log.splitlines() if line.strip()]
        self._write(name, {"failed": said[-1] if said else "without a word", "results": self._left(name)})

    def _left(self, name: str) -> Any:
        tests, numbers = (self.folder / "gpu" / f"{name}.{suffix}" for suffix in ("xml", "json"))
        try:
            return _tests(tests) if tests.exists() else json.loads(numbers.read_text()) if numbers.exists() else {}
        except (ValueError, ElementTree.ParseError):  # it was stopped while it wrote
            return {}

    def table(self) -> str:
        """A table in Markdown: a row for each part, in the order of gpu.sh."""
        rows = ["| part | measured |", "|---|---|"]
        for name, part in self.parts.items():
            words = self._words(name, part)
            if "failed" in part:
                words = "; before that: ".join(filter(None, [f"failed: {part['failed'].replace('|', '/')}", words]))
            if words:
                rows.append(f"| {name.replace('_', ' ')} | {words} |")
        origins = dict.fromkeys(f"{part['machine']}, commit {part['commit']}" for part in self.parts.values())
        return "\n".join([f"Measured on {'; '.join(origins)}.", "", *rows, ""])

    def _write(self, name: str, part: dict[str, Any]) -> None:
        self.parts[name] = {**self.origin, **part}
        self.path.write_text(json.dumps({"parts": self.parts}, indent=1) + "\n")
        (self.folder / "gpu.md").write_text(self.table())

    def _words(self, name: str, part: dict[str, Any]) -> str:
        results = part["results"]
        if not results:
            return ""
        if name == "profile":
            return _profile(results)
        if name == "peers":
            rows = {case: row for case, row in results["peers"].items() if isinstance(row, dict)}
            return "; ".join(f"{case}: {row['times_published']:.2f}x as published" for case, row in rows.items())
        if name in ("tests", "kernels"):
            return ", ".join(f"{count} {what}" for what, count in results.items() if count)
        if name.startswith("decode_"):
            return _decoding(_first(results["workloads"]))
        if name.startswith("step"):
            return _step(_first(_first(results["workloads"])))
        if name == "trl":
            return self._beside(_first(_first(results["workloads"])))
        if name == "ranks":
            return "; ".join(f"{way}: {_two_ranks(found)}" for way, found in results.items())
        if name == "plan":
            return "; ".join(_plan(case) for case in results["cases"].values())
        if name in ("quickstart", "real"):
            (first, last), speed = results["accuracy"], results["generated tokens/s"]
            words = f"held-out accuracy {first:.3f} -> {last:.3f} in {results['seconds']} s, installation not included"
            return f"{words}; {speed:.0f} sampled tokens/s"
        return ""

    def _beside(self, theirs: dict[str, Any]) -> str:
        words = f"TRL's step takes {theirs['median_s']:.2f} s{_memory(theirs)}"
        if step := self.parts.get("step_zero2", {}).get("results"):
            ours = _first(_first(step["workloads"]))
            words += f", {theirs['median_s'] / ours['median_s']:.1f}x ours"
        return words


def _first(named: dict[str, Any]) -> Any:
    """Entries of workloads or sides, of which gpu.sh measures one at a time."""
    return next(iter(named.values()))


def _tests(path: Path) -> dict[str, int]:
    suites = list(ElementTree.parse(path).getroot().iter("testsuite"))
    all_, skipped, *bad = (sum(int(x.get(n, 0)) for x in suites) for n in ("tests", "skipped", "failures", "errors"))
    return {"passed": all_ - skipped - sum(bad), "failed": sum(bad), "skipped": skipped}


def _profile(found: dict[str, dict[str, Any]]) -> str:
    """One row; all numbers are in the file, and a readable form of them is in the log."""
    words = [found.get("checks", {}).get("attention", "")]
    # What was skipped is a text.
    decode, prefill = (
        {case: row for case, row in found.get(part, {}).items() if isinstance(row, dict)}
        for part in ("decode", "prefill")
    )
    steps = [f"{case} {row['ms']:.2f} ({row['floor_ms']:.2f})" for case, row in decode.items()]
    if steps:
        words.append(f"ms a decode step, rows x context (and to read weights and cache): {', '.join(steps)}")
    if prefill:
        words.append(f"prefill {_first(prefill)['tokens_per_s']:,.0f} tokens/s")
    words += [
        f"training with {name} {row['tokens_per_s']:,.0f} tokens/s, MFU {row['mfu']:.1%}"
        for name, row in found.get("training", {}).items()
        if isinstance(row, dict)
    ]
    if "first" in found.get("capturing", {}):
        first = found["capturing"]["first"]
        words.append(f"{first['forwards']} graphs captured in {first['capturing_s']:.1f} s")
    words += [f"{name} failed: {part['failed']}".replace("|", "/") for name, part in found.items() if "failed" in part]
    return "; ".join(filter(None, words))


def _decoding(engines: dict[str, dict[str, Any]]) -> str:
    ours = engines["hybrid"]
    others = ", ".join(
        f"{name} {engine['median_s'] / ours['median_s']:.1f}x the time"
        for name, engine in engines.items()
        if name != "hybrid"
    )
    return f"{ours['tokens_per_s']:,.0f} tokens/s, {ours['floor_fraction']:.0%} of the bandwidth floor; {others}"


def _step(ours: dict[str, Any]) -> str:
    stages = ours["stages_s"]
    return (
        f"{ours['median_s']:.2f} s: generation {stages['generate']:.2f}, training {stages['train']:.2f}, the switch"
        f" {ours['switch_share']:.1%} of it; sampler against training forward {ours['logp_gap_mean']:.1e} nats on"
        f" average{_memory(ours)}"
    )


def _two_ranks(found: dict[str, Any]) -> str:
    if "failed" in found:
        return f"failed: {found['failed']}".replace("|", "/")
    same, apart = found["same, first step"], found["losses apart, first step"]
    return (
        f"{same:.0%} of the first step's completions are those of one rank, the losses {apart:.1e} apart; after the"
        f" SIGKILL of one the other ended in {found['gone_s']} s, and the run was resumed to its end"
    )


def _memory(side: dict[str, Any]) -> str:
    return f"; {side['peak_gpu_gb']:.1f} GB" if "peak_gpu_gb" in side else ""


def _plan(case: dict[str, Any]) -> str:
    words = f"{case['estimated GB']:.2f} GB estimated, {case['measured GB']:.2f} measured"
    if "nvidia-smi GB" in case:
        words += f"; with CUDA {case['process GB']:.2f} and {case['nvidia-smi GB']:.2f} by nvidia-smi"
    return words


def main() -> None:
    folder, command, *arguments = sys.argv[1:]
    results = Results(Path(folder))
    if command == "has":
        sys.exit(not results.has(*arguments))
    if command == "table":
        print(f"\n{results.table()}")
    else:
        {"add": results.add, "fail": results.fail}[command](*arguments)


if __name__ == "__main__":
    main()
