"""Which words of training_scripts/small_gpus.sh suit which model on which GPU, by plans.

    python benchmarks/small_gpus.py [--json benchmarks/results/small_gpus.json] [--docs docs/memory.md]

For each model and choice of words, the table has the fewest GPUs, one or two, on which a plan with 16 sequences fits.
"""

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
SHAPES = {f"Qwen/Qwen2.5-{size}-Instruct": MODELS[f"Qwen2.5-{size}"] for size in ("1.5B", "3B", "7B", "14B", "32B")}
WORDS = ("", "offload", "lora", "lora 4bit", "lora 4bit unmerged")
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
    """The table in Markdown: the number of GPUs, and the largest host memory of a rank. Left out are rows without any,
    and those of `unmerged` that need as many as without."""
    lines = [f"| model and words | {' | '.join(CARDS)} | host |", "|---|" + "---|" * (len(CARDS) + 1)]
    cells = {key: [str(p["gpus"]) if p else "-" for p in result["fits"].values()] for key, result in results.items()}
    for key, result in results.items():
        hosts = [plan["host"] * plan["gpus"] for plan in result["fits"].values() if plan]
        if hosts and (not key.endswith("unmerged") or cells[key] != cells[key.removesuffix(" unmerged")]):
            lines.append(f"| `{key}` | {' | '.join(cells[key])} | {max(hosts):.0f} |")
    return "\n".join(lines)


def main() -> None:
    arguments = parser_of(__doc__, docs=True).parse_args()
    results = plans()
    write(results, table(results), arguments, "small_gpus")


if __name__ == "__main__":
    main()
