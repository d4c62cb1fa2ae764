"""Which causal language models of transformers are accepted, and the proof that each of these is decoded and trained
exactly: a tiny random model of every type, against transformers' `generate()` and plain forward. What the paged decoder
refuses is proven with `rollout.decoder: transformers`, unless that refuses it too. Types with towers for pictures
(`TOWERED`) are compared with the whole model, and their exports are read back.

    python benchmarks/architectures.py [--json FILE] [--docs] [--only NAME ...]

`--docs` writes benchmarks/results/architectures.md. Each type runs in a process of its own, which is stopped after 90
seconds without an answer. tests/support/architecture_proof.py says what is compared; the configurations are in
tests/support/tiny_architectures.py.
"""

import argparse
import json
import multiprocessing
import sys
import tempfile
import textwrap
import time
import warnings
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
from machine import machine
from plan_gpus import replaced
from transformers import AutoConfig
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

ROOT = Path(__file__).parent.parent
sys.path.append(str(ROOT / "tests/support"))

from architecture_proof import as_numbers, prove  # noqa: E402
from tiny_architectures import VARIANTS, tiny_architecture  # noqa: E402

from hybrid_grpo.model.architectures import undecodable, unsupported  # noqa: E402
from hybrid_grpo.model.towers import TOWERED  # noqa: E402

SECONDS = 90.0
"""Most that one model may take."""
EXACT, REORDERED, AMPLIFIED = 1e-5, 1e-4, 5e-4
"""Bounds of the relative difference of a gradient; the second where sums over experts, over the streams of Gemma 3n, or
in layers with a state are rounded in another order; the third where experts follow such layers (with chunks of another
size, transformers' own gradients change by up to 3e-4), and with Gemma 4's embeddings of layers (6e-5)."""
PAGE = ROOT / "benchmarks/results/architectures.md"


def refusal(name: str) -> tuple[str | None, bool]:
    """Return why the paged decoder refuses a model type or variant (None if it does not), and whether
    `rollout.decoder: transformers` refuses it too."""
    model_type = VARIANTS.get(name, (name, {}))[0]
    try:
        config = AutoConfig.for_model(model_type)
    except Exception:
        return "its default configuration is invalid", True
    default = unsupported(config)
    with suppress(Exception):  # then `faults` fails too, and says why
        config = tiny_architecture(name)
    reason = unsupported(config)
    # A variant is refused for what it has beside the defaults.
    return (default or reason if reason and name not in VARIANTS else reason), undecodable(config) is not None


def faults(name: str, paged: bool) -> dict[str, Any]:
    """Return the gaps of a model type or variant, and what of them is too far off."""
    with tempfile.TemporaryDirectory() as folder:
        gaps = prove(name, Path(folder), paged)
    fields = tiny_architecture(name).get_text_config().to_dict()
    words = ("expert", "altup", "linear_key", "per_layer_input")
    has = {word: any(word in field for field in fields) for word in words}
    amplifies = has["per_layer_input"] or (has["linear_key"] and has["expert"])
    bound = AMPLIFIED if amplifies else REORDERED if not paged or any(has.values()) else EXACT
    return {"wrong": gaps.faults(bound), "gaps": as_numbers(gaps)}


def _run(name: str, answers: Connection) -> None:
    """Send the refusal, if there is one, then the faults with the decoder that takes the model."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    reason, by_both = refusal(name)
    answers.send({"refused": reason} if reason else {})
    try:
        answers.send({} if by_both else faults(name, paged=reason is None))
    except Exception as error:
        answers.send({"wrong": [f"{type(error).__name__}: {' '.join(str(error).split())[:100]}"]})


def guarded(name: str) -> dict[str, Any]:
    """Return the refusal and the faults of a model type or variant, by a process of its own that may crash or hang."""
    start = time.perf_counter()
    mine, theirs = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=_run, args=(name, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = {}
    try:
        for _ in range(2):
            found |= mine.recv() if mine.poll(SECONDS) else {"wrong": [f"no end in {SECONDS:.0f} s"]}
    except EOFError:
        process.join()
        found["wrong"] = [f"the process ended with status {process.exitcode}"]
    process.kill()
    process.join()
    return {**found, "seconds": round(time.perf_counter() - start, 1)}


def line(name: str, found: dict[str, Any]) -> str:
    """Return the line that is printed for a model type; `fallback`: `rollout.decoder: transformers` is proven where the
    paged decoder refuses."""
    proven = "WRONG" if found.get("wrong") else "fallback" if "refused" in found else "proven"
    words = [found.get("refused", ""), *found.get("wrong", [])]
    if gaps := found.get("gaps"):
        words.append(f"decoding {gaps['decoded']:.0e}, training {gaps['packed']:.0e}, gradients {gaps['gradient']:.0e}")
    verdict = proven if "wrong" in found else "refused"
    return f"{verdict:8} {name:28} {'; '.join(filter(None, words))} ({found['seconds']} s)"


def counts(types: dict[str, dict[str, Any]]) -> dict[str, int]:
    """Return how many types the paged decoder accepts and refuses, and how many are proven and wrong with the decoder
    that takes them."""
    accepted = [found for found in types.values() if "refused" not in found]
    others = [found for found in types.values() if "refused" in found]
    proven, fallback = (sum(found.get("wrong") == [] for found in group) for group in (accepted, others))
    wrong, fallback_wrong = (sum(bool(found.get("wrong")) for found in group) for group in (accepted, others))
    return {
        **{"types": len(types), "accepted": len(accepted), "proven": proven, "wrong": wrong, "refused": len(others)},
        **{"fallback_proven": fallback, "fallback_wrong": fallback_wrong},
        "refused_by_both": sum("wrong" not in found for found in others),
    }


def lists(found: dict[str, Any]) -> str:
    """Return the accepted and the refused model types as Markdown, from a result that was written as JSON."""
    types, named = found["types"], found["counts"]
    accepted = ", ".join(name for name, result in types.items() if "refused" not in result)
    parts = [
        f"Of {named['types']} types in transformers {found['machine']['transformers']}, all causal language models and"
        f" {len(TOWERED)} that also take pictures, {named['accepted']} are accepted, and {named['proven']} of these are"
        f" proven: {accepted}.",
        "Of the following types, text is trained; their [tower for pictures](../../docs/vision.md) is frozen:"
        f" {', '.join(TOWERED)}.",
        f"The paged decoder refuses {named['refused']}. Of these, `rollout.decoder: transformers` takes the following,"
        f" and {named['fallback_proven']} are proven in the same way:",
        _table({name: result for name, result in types.items() if "refused" in result and "wrong" in result}),
        f"The other {named['refused_by_both']} are refused with either decoder:",
        _table({name: result for name, result in types.items() if "wrong" not in result}),
    ]
    off = [f"{name} ({'; '.join(result['wrong'])})" for name, result in types.items() if result.get("wrong")]
    if off:
        parts.insert(4, f"Not proven: {', '.join(off)}.")
    return "\n\n".join(part if part.startswith("|") else textwrap.fill(part, 120) for part in parts)


def _table(types: dict[str, Any]) -> str:
    by_reason: dict[str, list[str]] = {}
    for name, result in types.items():
        by_reason.setdefault(result["refused"].split(" (")[0], []).append(name)
    rows = sorted(by_reason.items(), key=lambda row: -len(row[1]))
    return "\n".join(["| reason | types |", "|---|---|", *(f"| {why} | {', '.join(names)} |" for why, names in rows)])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--json", type=Path)
    parser.add_argument("--docs", action="store_true", help="write benchmarks/results/architectures.md")
    parser.add_argument("--only", nargs="*", help="model types or variants; FILE keeps the others; default: all")
    arguments = parser.parse_args()
    names = arguments.only or [*sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *TOWERED}), *VARIANTS]
    start, found = time.perf_counter(), {}
    if arguments.only and arguments.json and arguments.json.exists():
        known = json.loads(arguments.json.read_text(encoding="utf-8"))
        found = {**known["types"], **known["variants"]}
    with ThreadPoolExecutor(2) as pool:
        for name, result in zip(names, pool.map(guarded, names), strict=True):
            found[name] = result
            print(line(name, result), flush=True)
    types = {name: found[name] for name in sorted(found) if name not in VARIANTS}
    variants = {name: result for name, result in found.items() if name in VARIANTS}
    summary = counts(types)
    print(", ".join(f"{name} {count}" for name, count in summary.items()), f"({time.perf_counter() - start:.0f} s)")
    result = {"machine": machine(), "counts": summary, "types": types, "variants": variants}
    if arguments.json:
        rows = {group: [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in result[group].items()] for group in result}
        groups = (f"{json.dumps(group)}: {{\n  " + ",\n  ".join(rows[group]) + "\n}" for group in rows)
        arguments.json.write_text("{\n" + ",\n".join(groups) + "\n}\n")
    if arguments.docs:
        PAGE.write_text(replaced(PAGE.read_text(), lists(result), "architectures"))


if __name__ == "__main__":
    main()
