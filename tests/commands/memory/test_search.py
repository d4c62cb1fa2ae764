"""What makes a run fit that lacks memory, and what is said of one that does not."""

import itertools
from dataclasses import replace
from functools import partial

import pytest
from memory_plans import GPU, SIZES, N, parts, recipe

from hybrid_grpo.commands import plan as command
from hybrid_grpo.commands.memory.search import changed, changes, chosen, sufficient
from hybrid_grpo.commands.memory.shortage import shortage
from hybrid_grpo.config import BatchPlan, EngineConfig, LoraConfig, PolicyConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.data.packing import token_budget
from hybrid_grpo.distributed.hardware import of_table
from hybrid_grpo.run.memory import remedies
from hybrid_grpo.run.memory.dry_run import Footprint, Sizes
from hybrid_grpo.run.memory.plan import KEPT_BELOW, Plan


def test_a_copy_with_merged_adapters_that_does_not_fit_is_given_up():
    config, adapters = recipe(2, lora=LoraConfig(rank=8)), replace(SIZES, trained=10**7)
    hardware, measured = replace(GPU, device_bytes=6 * N), lambda *_: adapters
    plan = Plan(config, adapters, batch_plan(config, 1), 512, hardware, measured=measured)
    assert sufficient(plan) == ["rollout.weights unmerged"]
    assert "gathered weights" not in parts(replace(config, rollout=RolloutConfig(weights="unmerged")), 1)["generation"]


def test_a_stage_that_is_left_open_is_two_where_whole_weights_have_room():
    def stage(memory: int, **engine) -> int:
        config = TrainConfig(engine=EngineConfig(**engine))
        return chosen(Plan(config, SIZES, batch_plan(config, 8), 512, replace(GPU, device_bytes=memory))).stage

    whole = Plan(config := recipe(2), SIZES, batch_plan(config, 8), 512, GPU).peak.bytes
    enough = int(whole / KEPT_BELOW) + 1
    assert (stage(enough), stage(int(0.5 * enough)), stage(enough, zero_stage=3)) == (2, 3, 3)
    assert stage(enough, deepspeed={"zero_optimization": {"stage3_max_live_parameters": 1e8}}) == 3


@pytest.mark.parametrize(("kept", "given", "found"), [
    *[((1, 1, 1), {}, (None, None)), ((90, 20, 1), {}, (True, None))],
    ((1500, 1400, 80), {"micro_batch_tokens": 1024}, ("offload", 1024)),
    ((160, 90, 90), {}, (None, 8192)),
])  # fmt: skip
def test_recomputation_and_micro_batches_that_are_left_open_are_those_that_fit(kept, given, found):
    def measured(config: TrainConfig, _: BatchPlan) -> Sizes:
        whole = kept[(None, True, "offload").index(config.policy.gradient_checkpointing or None)] << 30
        tokens = min(config.policy.micro_batch_tokens or 16384, 16384)
        return replace(SIZES, training=Footprint(whole * tokens // 16384, 300, 200), tokens=tokens)

    config = replace(recipe(2), policy=PolicyConfig(**given))
    plan = chosen(Plan(config, measured(config, batch := batch_plan(config, 1)), batch, 512, GPU, measured=measured))
    assert (plan.config.policy.gradient_checkpointing, plan.config.policy.micro_batch_tokens) == found
    assert plan.lacking is None and (", gradient checkpointing" in str(plan)) == bool(found[0])


def test_the_second_shard_of_hpz_is_counted_and_can_be_given_up():
    """It was not in the plan: 4 GB a GPU at 16B."""
    zero = {"zero_hpz_partition_size": 4}
    config = replace(recipe(), engine=EngineConfig(zero_stage=3, deepspeed={"zero_optimization": zero}))
    one, two = parts(recipe(), 8), parts(config, 8)
    assert {phase["second shard"] for phase in two.values()} == {2 * N // 4} and "second shard" not in one["loss"]
    hosted = {**zero, "offload_param": {"device": "cpu"}}
    away = replace(config, engine=EngineConfig(zero_stage=3, deepspeed={"zero_optimization": hosted}))
    on_host = {part.name: part.bytes for part in Plan(away, SIZES, batch_plan(away, 8), 512, GPU).host.parts}
    assert "second shard" not in parts(away, 8)["loss"]
    assert on_host["weights"] == 2 * SIZES.padded * 3 // 8 + (1 << 27)
    made, change = Plan(config, SIZES, batch_plan(config, 8), 512, GPU), remedies.ONE_SHARD
    without = changed(made, change)
    assert change in changes(made.peak) and without is not None and without.peak.bytes == sum(one["reduction"].values())


@pytest.mark.parametrize("heads, proposed", [(14, True), (7, False), (0, False)])
def test_that_ranks_share_rows_is_proposed_where_they_can(heads, proposed):
    config = recipe(rollout=RolloutConfig(max_completion_tokens=100_000, prompts_per_step=8))
    plan = Plan(config, replace(SIZES, shared_heads=heads), batch_plan(config, 4), 512, GPU)
    assert ("engine.sequence_parallel 2" in remedies.smaller_micro_batches(plan)) == proposed


def test_a_run_that_clearly_does_not_fit_is_refused_by_name(monkeypatch, capsys):
    config = recipe(rollout=RolloutConfig(keep_cache="off"))
    batch = batch_plan(config, 1)

    def on(free: float) -> str | None:
        return shortage(Plan(config, SIZES, batch, 512, replace(GPU, device_bytes=int(free))))

    need = max(phase.least for phase in Plan(config, SIZES, batch, 512, GPU).phases)
    assert on(need / 0.969) is None
    warning = on(need / 1.1)
    assert warning is not None and warning.endswith("; it fits with engine.offload_optimizer true")
    with pytest.raises(UserError, match=r"the run does not fit: reduction needs 13.\d GiB a rank and 10.\d") as error:
        on(need / 1.2)
    assert "\n" not in str(error.value)
    assert str(error.value).endswith("it fits with engine.offload_optimizer true")
    with pytest.raises(UserError, match=r"are usable .*; ways out: engine.offload_optimizer between_steps, "):
        on(need / 12)
    small = Plan(config, SIZES, batch, 512, replace(GPU, device_bytes=int(need / 12)))
    monkeypatch.setattr(command, "_of_shapes", lambda *_: small)
    with pytest.raises(SystemExit, match="2"):
        command.run(["owner/model"])
    assert capsys.readouterr().out.startswith("the run does not fit: reduction"), "the verdict is first"


def sizes_of(config: TrainConfig, batch: BatchPlan, billions: float) -> Sizes:
    """The sizes of a model, roughly, since a dry run takes seconds: what counts is which settings make them smaller."""
    count, wide = int(billions * 1e9), int(3000 * billions**0.5)
    row, rows = config.rollout.longest(512), batch.prompts_per_rank * batch.num_generations // batch.num_minibatches
    tokens = row * max(1, min(rows, token_budget(config.policy, on_gpu=True, gradients=True) // row))
    kept = tokens * wide * (40 if config.policy.gradient_checkpointing else 600)
    trained = count // 100 if config.lora.rank else count
    return Sizes(
        count, trained, 1 << 28, count, 1 << 17, 24 * wide, Footprint(kept, 90_000 * tokens, 20 * kept // 40), 0,
        tokens=tokens,
    )  # fmt: skip


@pytest.mark.parametrize(("billions", "gpu"), [
    *((size, "rtx4090") for size in (0.5, 1.5, 7.0, 32.0)),
    *((1.5, "a100-40gb"), (7.0, "a100-40gb"), (7.0, "h100"), (32.0, "h100"), (0.5, "h200"), (32.0, "h200")),
])  # fmt: skip
def test_what_a_refusal_proposes_makes_the_run_fit(billions, gpu):
    """Typed as its reader would: all settings that it fits with, or, where there are none, the first way out, again
    and again. For 7B on 8 H100s at ZeRO-3, the first way out was engine.zero_stage."""
    ends = {"fits": 0, "a machine with more memory": 0}
    for ranks, stage, more in itertools.product((1, 8), ("null", 1, 2, 3), ([], ["--rollout.keep_cache=on"])):
        options = [f"--engine.zero_stage={stage}", "--rollout.max_completion_tokens=1024", *more]
        least, sufficed = None, False
        while True:
            config = parse(TrainConfig, options, "train").config
            batch, measured = batch_plan(config, ranks), partial(sizes_of, billions=billions)
            made = Plan(config, measured(config, batch), batch, 512, of_table(gpu), measured=measured)
            smaller, least = least, max(phase.least for phase in made.phases)
            assert smaller is None or least < smaller, (options, ranks)
            try:
                message = shortage(made) or ""
            except UserError as error:
                message = str(error)
            if not message:
                way_out = "fits"
                break
            assert not sufficed, (options, ranks, message)
            _, fits, settings = message.partition("it fits with ")
            sufficed, (way_out, *_) = bool(fits), message.partition("ways out: ")[2].split(",")
            if fits:
                options += [f"--{setting.replace(' ', '=')}" for setting in settings.split(", ")]
            elif way_out in ends or (way_out == "more ranks" and ranks == 32):
                break
            elif way_out == "more ranks":
                ranks *= 2
            else:
                options.append(f"--{way_out.replace(' ', '=')}")
        ends["fits" if way_out == "fits" else "a machine with more memory"] += 1
    assert ends["fits"] > (6 if billions < 32 else -1), ends
