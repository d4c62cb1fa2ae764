"""Which causal language models of transformers are accepted, and the proof that each of these is decoded and trained
exactly: a tiny random model of every type, against transformers' `generate()` and plain forward.

    python benchmarks/architectures.py [--json FILE] [--docs] [--only NAME ...]

`--docs` writes the lists in docs/rollouts.md. Each type runs in a process of its own, which is stopped after a minute.
tests/support/architecture_proof.py says what is compared, tests/support/tiny_architectures.py has the configurations.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import re
import sys
import tempfile
import textwrap
import time
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/support"))

from architecture_proof import as_numbers, prove  # noqa: E402
from tiny_architectures import VARIANTS, tiny_architecture  # noqa: E402

from hybrid_grpo.model.architectures import unsupported  # noqa: E402

SECONDS = 60.0
"""Most that one model may take."""
EXACT, REORDERED = 1e-5, 1e-4
"""Bounds of the relative difference of a gradient; the second where sums over experts, or over the streams of Gemma 3n,
are rounded in another order."""
PAGE = ROOT / "docs/rollouts.md"


def judged(name: str) -> dict[str, Any]:
    """Return the verdict on a model type or variant: accepted or refused, why, and the gaps of one that is accepted."""
    model_type = VARIANTS.get(name, (name, {}))[0]
    default = _refusal(AutoConfig.for_model, model_type)
    try:
        config = tiny_architecture(name)
    except Exception as error:
        return {"refused": default} if default else {"wrong": [f"no tiny configuration: {_words(error)}"]}
    if reason := unsupported(config):
        # A variant is refused for what it has beside the defaults.
        return {"refused": reason if name in VARIANTS else default or reason}
    with tempfile.TemporaryDirectory() as folder:
        gaps = prove(name, Path(folder))
    reorders = any("expert" in field or "altup" in field for field in config.get_text_config().to_dict())
    return {"wrong": gaps.faults(REORDERED if reorders else EXACT), "gaps": as_numbers(gaps)}


def _refusal(configuration: Any, model_type: str) -> str | None:
    try:
        return unsupported(configuration(model_type))
    except ValueError:
        return "its default configuration is invalid"


def _words(error: BaseException) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _run(name: str, answers: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    try:
        answers.send(judged(name))
    except Exception as error:
        answers.send({"wrong": [_words(error)]})


def guarded(name: str) -> dict[str, Any]:
    """Return `judged` of a name, by a process of its own that may crash or hang."""
    start = time.perf_counter()
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(name, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {"wrong": [f"no end in {SECONDS:.0f} s"]}
    try:
        if mine.poll(SECONDS):
            found = mine.recv()
    except EOFError:
        process.join()
        found = {"wrong": [f"the process ended with status {process.exitcode}"]}
    process.kill()
    process.join()
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    """Return the line that is printed for a model type."""
    verdict = "refused" if "refused" in found else "WRONG" if found["wrong"] else "proven"
    words = [found.get("refused") or "; ".join(found["wrong"])]
    if gaps := found.get("gaps"):
        words.append(f"decoding {gaps['decoded']:.0e}, packed {gaps['packed']:.0e}, gradients {gaps['gradient']:.0e}")
    return f"{verdict:8} {name:28} {'; '.join(filter(None, words))} ({found['seconds']} s)"


def counts(types: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return how many types are accepted, proven, wrong and refused."""
    accepted = [found for found in types.values() if "refused" not in found]
    wrong = sum(bool(found["wrong"]) for found in accepted)
    return {
        **{"types": len(types), "accepted": len(accepted), "proven": len(accepted) - wrong},
        **{"wrong": wrong, "refused": len(types) - len(accepted)},
    }


def lists(found: dict[str, Any]) -> str:
    """Return the accepted and the refused model types as Markdown, from a result that was written as JSON."""
    types, named = found["types"], found["counts"]
    refused: dict[str, list[str]] = {}
    for name, verdict in types.items():
        if "refused" in verdict:
            refused.setdefault(verdict["refused"].split(" (")[0], []).append(name)
    accepted = ", ".join(name for name, verdict in types.items() if "refused" not in verdict)
    rows = [f"| {reason} | {', '.join(names)} |" for reason, names in sorted(refused.items(), key=lambda r: -len(r[1]))]
    head = (
        f"Of the {named['types']} types of causal language models in transformers {found['machine']['transformers']},"
        f" {named['accepted']} are accepted, and {named['proven']} of these are proven: {accepted}."
    )
    refusals = f"Each of the other {named['refused']}, with the kinds of layers that it may have, is refused for this reason:"
    lines = [*textwrap.wrap(head, 120), "", *textwrap.wrap(refusals, 120), "", "| reason | types |", "|---|---|", *rows]
    return "\n".join(lines)


def replaced(page: str, text: str) -> str:
    """Return the page with the lists between its two marks."""
    done, count = re.subn(r"(?s)(<!-- architectures -->\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + text + m[2], page)
    assert count == 1, "the page has no place for the lists"
    return done


def main() -> None:
    """Measure, print, and write FILE."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write the lists in docs/rollouts.md")
    parser.add_argument("--only", nargs="*", help="model types or variants; default: all")
    parser.add_argument("--jobs", type=int, default=2)
    arguments = parser.parse_args()
    names = arguments.only or [*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS]
    start, found = time.perf_counter(), {}
    with ThreadPoolExecutor(arguments.jobs) as pool:
        for name, result in zip(names, pool.map(guarded, names), strict=True):
            found[name] = result
            print(line(name, result), flush=True)
    types = {name: result for name, result in found.items() if name not in VARIANTS}
    variants = {name: result for name, result in found.items() if name in VARIANTS}
    summary = counts(types)
    print(", ".join(f"{name} {count}" for name, count in summary.items()), f"({time.perf_counter() - start:.0f} s)")
    print("reasons:", dict(Counter(result.get("refused") for result in types.values()).most_common(8)))
    machine = {"transformers": transformers.__version__, "torch": torch.__version__}
    result = {"machine": machine, "counts": summary, "types": types, "variants": variants}
    if arguments.json:
        rows = {group: [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result[group].items()] for group in result}
        groups = (f"{json.dumps(group)}: {{\n  " + ",\n  ".join(rows[group]) + "\n}" for group in rows)
        arguments.json.write_text("{\n" + ",\n".join(groups) + "\n}\n")
    if arguments.docs:
        PAGE.write_text(replaced(PAGE.read_text(), lists(result)))


if __name__ == "__main__":
    main()
