"""Which model fits which GPU, and on how many: plans of one recipe for the models that people train.

    python benchmarks/plan_gpus.py [MODEL ...] [--json benchmarks/results/plan_gpus.json] [--docs docs/memory.md]

Nothing is measured and no weights are created, so it runs anywhere. Dry runs have two layers and three, from which the
sizes of the whole model follow. All models take some minutes; given models replace their rows in the file.

The recipe: bfloat16, ZeRO-3 (on one GPU ZeRO-2), gradient checkpointing, prompts of 512 tokens and completions of
1,024, a rollout of 32 x 8, prefills of 2,048 tokens, no reference, everything else as it is by default. A model fits
where the plan's phases do, with a cache for at least `SEQUENCES` sequences at once.
"""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from machine import parser_of
from transformers import AutoConfig

from hybrid_grpo.commands.plan import SHAPES
from hybrid_grpo.config import EngineConfig, PolicyConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.distributed.hardware import of_table
from hybrid_grpo.run.memory.dry_run import Sizes, measure
from hybrid_grpo.run.memory.plan import Plan

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks/results/plan_gpus.json"
PROMPT = 512
SEQUENCES = 16
"""Sequences below which decoding is so slow that a model does not count as fitting."""
GPUS = {"24": "rtx4090", "40": "a100-40gb", "80": "h100", "141": "h200"}
"""A GPU for each memory size, in 10^9 bytes."""
RANKS = (1, 2, 4, 8)


Shape = dict[str, Any]
"""The values of a model's config.json."""
_SIZES = {"Qwen2.5": "0.5B 1.5B 3B 7B 14B 32B", "Qwen3": "0.6B 1.7B 4B 8B 14B 32B"}
MODELS: dict[str, Shape] = {
    f"{family}-{n}": SHAPES[f"{family}-{n}"] for family in _SIZES for n in _SIZES[family].split()
}
MODELS["Llama-3-8B"] = SHAPES["Meta-Llama-3-8B"]


def model_config(shape: Shape, **changed: Any) -> Any:
    """A shape as transformers loads it, with some values changed."""
    values = {"max_position_embeddings": 8192, **shape, **changed}
    values.pop("billions", None)
    return AutoConfig.for_model(values.pop("model_type"), **values)


def recipe(offload: bool) -> TrainConfig:
    """The recipe of the table, with the optimizer on the GPU or in host memory."""
    return TrainConfig(
        policy=PolicyConfig(gradient_checkpointing=True),
        engine=EngineConfig(offload_optimizer=offload, zero_stage=3 if offload else None),
        rollout=RolloutConfig(prompts_per_step=32, num_generations=8, max_completion_tokens=1024, prefill_tokens=2048),
    )


def sizes_of(shape: Shape, config: TrainConfig, prompt: int) -> Sizes:
    return measure(config, model_config(shape), batch_plan(config, 1), prompt, on_gpu=True)


def plans(shape: Shape) -> dict[str, Any]:
    """The model's entry in the file: by GPU memory and place of the optimizer, the plan on the fewest sufficient
    GPUs."""
    # The same on every number of ranks: a micro-batch is one group, and four prompts fill a prefill.
    sizes = sizes_of(shape, recipe(offload=False), PROMPT)
    fitting: dict[str, dict[str, Any]] = {}
    for memory, gpu in GPUS.items():
        of_memory = fitting[memory] = {}
        for place, offload in (("on the GPU", False), ("in host memory", True)):
            config = recipe(offload)
            made = (Plan(config, sizes, batch_plan(config, n), PROMPT, of_table(gpu)) for n in RANKS)
            of_memory[place] = next((summary(plan) for plan in made if fits(plan)), None)
    return {"parameters": sizes.parameters, "fits": fitting}


def fits(plan: Plan) -> bool:
    """Whether every phase has enough memory, with a margin, and the cache has room for enough sequences."""
    return plan.lacking is None and plan.sequences >= SEQUENCES


def summary(plan: Plan) -> dict[str, Any]:
    """The numbers of a plan: GPUs, sequences at once, and GiB of host memory, without that of this program's own
    process."""
    host = sum(part.bytes for part in plan.host.parts if part.name not in ("runtime", "copy to save"))
    return {"gpus": plan.ranks, "sequences": plan.sequences, "host": round(host / 2**30, 2)}


def table(results: dict[str, Any]) -> str:
    """The table in Markdown: the fewest GPUs by memory."""
    rows = ["| model | " + " | ".join(f"{memory} GB" for memory in GPUS) + " |", "|---|" + "---|" * len(GPUS)]
    for name, result in results.items():
        rows.append(f"| {name} | {' | '.join(_fewest(result['fits'][memory]) for memory in GPUS)} |")
    return "\n".join(rows)


def _fewest(of_memory: dict[str, Any]) -> str:
    on_gpu, offloaded = (str(planned["gpus"]) if planned else "-" for planned in of_memory.values())
    return on_gpu if on_gpu == offloaded else f"{on_gpu} ({offloaded})"


def write(results: dict[str, Any], rows: str, arguments: argparse.Namespace, mark: str) -> None:
    """Print the table, and write it and the results to the files that were given."""
    print(rows)
    if arguments.json:
        lines = (f"{json.dumps(name)}: {json.dumps(result)}" for name, result in results.items())
        arguments.json.write_text("{\n" + ",\n".join(lines) + "\n}\n")
    if arguments.docs:
        arguments.docs.write_text(replaced(arguments.docs.read_text(), rows, mark))


def replaced(page: str, rows: str, mark: str = "plan_gpus") -> str:
    """The page with the table between the two marks."""
    done, count = re.subn(rf"(?s)(<!-- {mark} -->\n\n).*?(\n\n<!-- end -->)", lambda m: m[1] + rows + m[2], page)
    assert count == 1, "the page has no place for the table"
    return done


def main() -> None:
    parser = parser_of(__doc__, docs=True)
    parser.add_argument("models", nargs="*", help=f"of {', '.join(MODELS)}; not given: all")
    arguments = parser.parse_args()
    seen = json.loads(arguments.json.read_text()) if arguments.json and arguments.json.exists() else {}
    for name in arguments.models or MODELS:
        seen[name] = plans(MODELS[name])
        print(f"{name}: {seen[name]['parameters']:,} parameters", flush=True)
    results = {name: seen[name] for name in MODELS if name in seen}
    write(results, table(results), arguments, "plan_gpus")


if __name__ == "__main__":
    main()
