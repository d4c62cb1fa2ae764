"""Which words of training_scripts/small_gpus.sh suit which model on which GPU, by plans.

    python benchmarks/small_gpus.py [--json benchmarks/results/small_gpus.json] [--docs docs/memory.md]

Nothing is measured and no weights are created. For each model and choice of words, the table has the fewest GPUs, one
or two, on which the plan fits with a cache for at least `SEQUENCES` sequences at once. Prompts have up to 512 tokens in
the recipe, and completions too. It takes minutes.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from machine import parser_of
from plan_gpus import MODELS, ROOT, fits, sizes_of, summary, write

from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.distributed.hardware import of_table
from hybrid_grpo.run.memory.dry_run import Footprint, Sizes
from hybrid_grpo.run.memory.plan import Plan

RESULTS = ROOT / "benchmarks/results/small_gpus.json"
SHAPES = {f"Qwen/Qwen2.5-{size}-Instruct": MODELS[f"Qwen2.5-{size}"] for size in ("0.5B", "1.5B", "3B", "7B")}
WORDS = ("", "offload", "lora", "lora 4bit")
CARDS = {
    "24 GB (RTX 3090, RTX 4090, A10G)": ("a10g", "rtx3090", "rtx4090"),
    "32 GB (RTX 5090)": ("rtx5090",),
    "40 GB (A100)": ("a100-40gb",),
    "48 GB (L40S)": ("l40s",),
}
"""Columns of the table, and the GPUs that a plan has to fit."""


def config_of(model: str, words: str) -> TrainConfig:
    """The configuration that the script makes of a model and words."""
    files = ["gsm8k.yaml", *(f"small_gpus/{word}.yaml" for word in ["full", *words.split()])]
    recipes = [argument for file in files for argument in ("--config", str(ROOT / "training_scripts" / file))]
    return parse(TrainConfig, [*recipes, "--policy.model", model], "train").config


def plan_of(config: TrainConfig, sizes: Sizes, gpu: str, gpus: int) -> Plan:
    prompt = config.data.max_prompt_tokens
    assert prompt is not None
    return Plan(config, sizes, batch_plan(config, gpus), prompt, of_table(gpu))


def fewest(config: TrainConfig, sizes: Sizes, cards: tuple[str, ...]) -> Plan | None:
    """The plan on the fewest GPUs of the smallest of the cards, if one or two suffice for all of them."""
    for gpus in (1, 2):
        plans = [plan_of(config, sizes, gpu, gpus) for gpu in cards]
        if all(map(fits, plans)):
            return plans[0]
    return None


def plans() -> dict[str, Any]:
    results: dict[str, Any] = {}
    for model, shape in SHAPES.items():
        for words in WORDS:
            if words != "offload":  # takes memory from elsewhere, but the model has the same sizes
                config = config_of(model, words)
                sizes = sizes_of(shape, config, config.data.max_prompt_tokens or 0)
            key = f"{model} {words}".strip()
            config = config_of(model, words)
            fitting = {column: fewest(config, sizes, cards) for column, cards in CARDS.items()}
            found = {column: plan and summary(plan) for column, plan in fitting.items()}
            results[key] = {"sizes": asdict(sizes), "fits": found}
            print(key, [plan and plan.ranks for plan in fitting.values()], flush=True)
    return results


def saved_sizes(result: dict[str, Any]) -> Sizes:
    fields = result["sizes"]
    return Sizes(**{**fields, "training": Footprint(**fields["training"])})


def table(results: dict[str, Any]) -> str:
    """The table in Markdown: the number of GPUs, and the largest host memory of a rank."""
    lines = [f"| model and words | {' | '.join(CARDS)} | host |", "|---|" + "---|" * (len(CARDS) + 1)]
    for key, result in results.items():
        fits = result["fits"].values()
        hosts = [plan["host"] * plan["gpus"] for plan in fits if plan]
        counts = " | ".join(str(plan["gpus"]) if plan else "-" for plan in fits)
        lines.append(f"| `{key}` | {counts} | {max(hosts):.0f} |" if hosts else f"| `{key}` | {counts} | - |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser_of(__doc__, docs=True).parse_args()
    results = plans()
    write(results, table(results), arguments, "small_gpus")


if __name__ == "__main__":
    main()
