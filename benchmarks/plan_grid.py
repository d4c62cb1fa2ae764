"""Whether plans keep their word: models x GPUs x ranks x places of the weights and the optimizer.

    python benchmarks/plan_grid.py [--json benchmarks/results/plan_grid.json]

Nothing runs on a GPU. The recipe is that of plan_gpus.py without what makes it small: no gradient checkpointing, the
default prefill. For each case the plan says that the run fits, that it fits with other settings, or that it does not
fit. The benchmark looks for three kinds of errors:

- `too full`: a plan that fits, or is said to fit with settings, leaves less than 3 % of the GPU free in some phase;
- `does not help`: settings that a run is said to fit with do not make it fit;
- `overlooked`: no settings were named, and some of all combinations fit.
"""

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from machine import parser_of, save
from plan_gpus import MODELS, PROMPT, RANKS, Shape, recipe, sizes_of

from hybrid_grpo.commands.memory.search import sufficient, with_settings
from hybrid_grpo.config import BatchPlan, LoraConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.distributed.hardware import GPUS, of_table
from hybrid_grpo.run.memory.dry_run import Sizes
from hybrid_grpo.run.memory.plan import Plan

MARGIN = 0.03
HOSTED = {"zero_optimization": {"offload_param": {"device": "cpu"}}}
KINDS = ("on the GPU", "optimizer in host memory", "weights too", "LoRA", "LoRA in 4 bits")
Measured = Callable[[TrainConfig, BatchPlan], Sizes]


@dataclass(frozen=True)
class Case:
    model: str
    gpu: str
    ranks: int
    kind: str


def config_of(kind: str) -> TrainConfig:
    config = recipe(offload=kind in ("optimizer in host memory", "weights too"))
    engine = replace(config.engine, deepspeed=HOSTED) if kind == "weights too" else config.engine
    lora = LoraConfig(rank=16, load_in_4bit=kind.endswith("bits")) if kind.startswith("LoRA") else config.lora
    engine = replace(engine, zero_stage=2) if lora.load_in_4bit else engine
    plain = replace(config.policy, gradient_checkpointing=False)
    return replace(config, policy=plain, engine=engine, lora=lora, rollout=replace(config.rollout, prefill_tokens=None))


def judged(case: Case, measured: Measured) -> tuple[str, list[str], list[str]]:
    """What the plan says, the settings it names, and the errors in that."""
    config = config_of(case.kind)
    batch = batch_plan(config, case.ranks)
    plan = Plan(config, measured(config, batch), batch, PROMPT, of_table(case.gpu), measured=measured)
    if plan.lacking is None:
        return "fits", [], ["too full"] * too_full(plan)
    settings = sufficient(plan)
    if settings is None:
        return "does not fit", [], ["overlooked"] * any(p.lacking is None for p in smallest(plan))
    better = with_settings(plan, named(settings))
    assert better is not None
    if better.lacking is not None:
        return "fits with settings", settings, ["does not help"]
    # The search scales the activations of another dry run; here it is made.
    again = replace(better, sizes=measured(better.config, better.batch))
    return "fits with settings", settings, ["too full"] * too_full(again)


def too_full(plan: Plan) -> bool:
    return plan.peak.bytes > (1 - MARGIN) * plan.hardware.device_bytes


def smallest(plan: Plan) -> Iterator[Plan]:
    """The plan with everything small that only costs time, and all combinations of what might take more memory."""
    zero = "engine.deepspeed.zero_optimization"
    small = ["policy.gradient_checkpointing true", f"policy.micro_batch_tokens {plan.longest // 2}"]
    base = with_settings(plan, named([*small, "rollout.max_slots 8", "rollout.prefill_tokens 512"]))
    assert base is not None
    choices = (
        (None, "engine.offload_optimizer between_steps", "engine.offload_optimizer true"),
        (None, "engine.zero_stage 1", "engine.zero_stage 2"),
        *((None, f"{zero}.offload_param.device cpu"), (None, f"{zero}.reduce_bucket_size 10000000")),
        (None, f"{zero}.stage3_max_live_parameters {plan.sizes.largest}"),
        (None, "rollout.weights unmerged") if plan.config.lora.rank else (None,),
    )
    for chosen in itertools.product(*choices):
        try:
            made = with_settings(base, named(filter(None, chosen)))
        except ValueError:  # stages below 3 cannot offload weights
            continue
        if made is not None:  # ZeRO-3 merges adapters
            yield made


def named(settings: Iterable[str]) -> dict[str, str]:
    """Values by the names of settings."""
    return {name: value for name, _, value in (setting.partition(" ") for setting in settings)}


def dry_runs(shape: Shape) -> Measured:
    """Dry runs of a model, each made once."""

    @cache
    def of(checkpointing: bool, tokens: int | None, lora: int, split: int) -> Sizes:
        config = config_of("LoRA" if lora else "on the GPU")
        policy = replace(config.policy, gradient_checkpointing=checkpointing, micro_batch_tokens=tokens)
        engine = replace(config.engine, sequence_parallel=split)
        return sizes_of(shape, replace(config, policy=policy, engine=engine), PROMPT)

    def measured(config: TrainConfig, batch: BatchPlan) -> Sizes:
        policy, split = config.policy, config.engine.sequence_parallel
        # A micro-batch has one group, with any number of ranks.
        return of(policy.gradient_checkpointing, policy.micro_batch_tokens, config.lora.rank, split)

    return measured


def grid(models: Mapping[str, Measured], gpus: list[str], ranks: tuple[int, ...]) -> Iterator[tuple[Case, Any]]:
    for case in itertools.starmap(Case, itertools.product(models, gpus, ranks, KINDS)):
        yield case, judged(case, models[case.model])


def main() -> None:
    arguments = parser_of(__doc__).parse_args()
    says: dict[str, Counter[str]] = {kind: Counter() for kind in KINDS}
    errors: list[dict[str, Any]] = []
    proposed: Counter[str] = Counter()
    for name, shape in MODELS.items():
        for case, (says_so, settings, wrong) in grid({name: dry_runs(shape)}, list(GPUS), RANKS):
            says[case.kind][says_so] += 1
            proposed.update(setting.partition(" ")[0] for setting in settings)
            errors += [{**asdict(case), "error": error, "settings": settings} for error in wrong]
        print(f"{name}: {sum(map(Counter.total, says.values()))} cases, {len(errors)} errors", flush=True)
    result = {
        "cases": sum(map(Counter.total, says.values())),
        "says": {kind: dict(count) for kind, count in says.items()},
        "settings proposed": dict(proposed.most_common()),
        "errors": errors,
    }
    print(json.dumps(result, indent=1))
    save(arguments.json, result)


if __name__ == "__main__":
    main()
