"""The plan against counts by hand, and its command."""

from dataclasses import replace
from pathlib import Path

import forks
import pytest
import torch
from launching import make_task
from memory_plans import CPU, GPU, SIZES, N, parts, recipe
from transformers import Qwen2Config

from hybrid_grpo.commands.memory.search import with_settings
from hybrid_grpo.commands.memory.shortage import shortage
from hybrid_grpo.commands.plan import lines, step_seconds
from hybrid_grpo.config import EngineConfig, GrpoConfig, LoraConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.run import CheckpointConfig
from hybrid_grpo.distributed import hardware as hardware_module
from hybrid_grpo.distributed.hardware import CUDA_CONTEXT_BYTES, host_free_bytes, of_device, of_table
from hybrid_grpo.model.logprobs import TILE_COLUMNS
from hybrid_grpo.run.memory import plan as plans
from hybrid_grpo.run.memory.dry_run import NeedsData, measure
from hybrid_grpo.run.memory.optimizer import gradients
from hybrid_grpo.run.memory.phases import Part
from hybrid_grpo.run.memory.plan import KEPT_BELOW, NCCL_BYTES, Plan


def test_states_of_qwen2_0_5b_by_stage():
    for stage, ranks, weights, masters, moments in [
        (3, 1, 2 * N, 4 * N, 8 * N),
        (3, 8, 2 * N // 8, 4 * N // 8, 8 * N // 8),
        (2, 8, 2 * N, 4 * N // 8, 8 * N // 8),
        (1, 8, 2 * N, 4 * N // 8, 8 * N // 8),
    ]:
        seen = parts(recipe(stage), ranks)["optimizer step"]
        assert (seen["weights"], seen["float32 masters"], seen["Adam's moments"]) == (weights, masters, moments), stage
        assert seen["runtime"] == CUDA_CONTEXT_BYTES
    plain = parts(recipe(0, "float32"), 1)["optimizer step"]
    assert "float32 masters" not in plain
    assert (plain["weights"], plain["gradients"], plain["Adam's moments"]) == (4 * N, 4 * N, 8 * N)
    # Gradients in one tensor; fused kernels have no temporaries. Stage 0 takes gradients by the bucket.
    assert (plain["step"], parts(recipe(3, "float32"), 8)["optimizer step"]["step"]) == (4 * N, 4 * (N // 8))
    assert "step" not in parts(recipe(2), 8)["optimizer step"]


def test_gradients_are_a_shard_and_a_bucket():
    bucket = 500_000_000
    assert parts(recipe(3), 8)["loss"]["gradients"] == 2 * bucket + 4 * N // 8
    assert parts(recipe(1), 8)["loss"]["gradients"] == 4 * bucket + 4 * N // 8
    small = recipe(3)
    small = replace(small, engine=EngineConfig(deepspeed={"zero_optimization": {"reduce_bucket_size": 5e7}}))
    assert parts(small, 8)["loss"]["gradients"] == 2 * 50_000_000 + 4 * N // 8
    two = replace(recipe(2), engine=EngineConfig(zero_stage=2, deepspeed={"zero_optimization": {"overlap_comm": True}}))
    assert parts(two, 8)["loss"]["gradients"] == 2 * 2 * bucket + 4 * N // 8
    # Of a bucket that is reduced, stages 1 and 3 make a copy, and stage 3 keeps its shard in float32.
    copies = {stage: parts(recipe(stage), 8)["reduction"].get("reduction") for stage in (1, 2, 3)}
    assert copies == {1: 2 * N, 2: None, 3: 2 * N + 4 * N // 8}
    assert parts(recipe(3, "float32"), 8)["reduction"]["reduction"] == 4 * N
    # A CPU gives memory to what is written to, and the bucket is larger than the model.
    assert parts(recipe(3), 1, CPU)["loss"]["gradients"] == 2 * N + 4 * N


def test_the_gather_is_free_on_one_rank_and_below_stage_3():
    assert "gathered weights" not in parts(recipe(3), 1)["generation"]
    assert "gathered weights" not in parts(recipe(2), 8)["generation"]
    assert "fetched weights" not in parts(recipe(2), 8)["loss"]
    assert parts(recipe(3), 8)["loss"]["fetched weights"] == 2 * N
    assert parts(recipe(3), 8)["generation"]["gathered weights"] == 2 * N
    adapted = recipe(2, lora=LoraConfig(rank=8))
    assert parts(adapted, 8)["generation"]["gathered weights"] == 2 * SIZES.linear


def test_weights_in_four_bits_wait_in_host_memory_where_decoding_needs_the_room():
    packed = int(SIZES.linear * (4 + 8 / 64 + 32 / (64 * 256)) / 8 + SIZES.tables)
    for keep in ("off", "auto"):
        config = recipe(2, lora=LoraConfig(rank=8, load_in_4bit=True), rollout=RolloutConfig(keep_cache=keep))
        seen, made = parts(config, 1), Plan(config, SIZES, batch_plan(config, 1), 512, GPU)
        assert {phase["weights"] for phase in seen.values()} == {2 * (N - SIZES.linear - SIZES.tables)}
        assert seen["backward"]["packed weights"] == seen["optimizer step"]["packed weights"] == packed
        assert seen["backward"]["unpacked weights"] == 2 * SIZES.largest_linear
        held = {part.name: part.bytes for part in made.host.parts}, seen["generation"]
        assert [of.get("packed weights", 0) for of in held] == ([packed, 0] if keep == "off" else [0, packed])
    beside = parts(replace(config, rollout=RolloutConfig(weights="unmerged")), 1)["generation"]
    assert beside["packed weights"] == packed and "gathered weights" not in beside


def test_eight_bits_and_gradients_that_are_freed_leave_more_for_the_cache():
    whole = 2 * (N - SIZES.eight_bits + SIZES.largest_linear)
    for keep in ("off", "on"):
        seen = parts(recipe(3, rollout=RolloutConfig(weights="int8", keep_cache=keep)), 8)
        assert seen["generation"]["gathered weights"] == SIZES.eight_bits + whole
        assert seen["generation"]["unpacked weights"] == 2 * SIZES.largest_linear
        assert seen["export"]["gathered weights"] >= 2 * N
        assert ("gradients" in seen["generation"], "gradients" in seen["export"]) == (keep == "on",) * 2
    whole = parts(recipe(2, rollout=RolloutConfig(weights="int8")), 8)["generation"]
    assert whole["gathered weights"] == SIZES.eight_bits


def test_the_cache_is_what_slots_or_settings_or_memory_allow():
    token = SIZES.token_bytes
    rollout = RolloutConfig(prompts_per_step=4, num_generations=8, max_completion_tokens=512)
    # 32 sequences of 1,024 tokens fill 32 pages of 32, and have one to grow into.
    assert parts(recipe(rollout=rollout), 1)["generation"]["keys and values"] == (32 * 33 + 2) * 32 * token
    few = replace(rollout, max_slots=4)
    assert parts(recipe(rollout=few), 1)["generation"]["keys and values"] == (4 * 33 + 2) * 32 * token
    bound = replace(rollout, cache_gb=0.25)
    assert parts(recipe(rollout=bound), 1)["generation"]["keys and values"] == 1 << 28
    # It can do with the pages of one sequence, and the share of the memory that they are.
    given_back = recipe(rollout=replace(rollout, keep_cache="off"))
    made = Plan(given_back, SIZES, batch_plan(given_back, 1), 512, GPU)
    assert made.cache().least == int((32 + 3) * 32 * token / plans.GPU_SHARE)
    assert parts(recipe(rollout=rollout), 1, CPU)["generation"]["keys and values"] == (32 * 33 + 2) * 32 * token


def test_a_gpu_also_holds_what_is_no_tensor_of_the_model():
    """Measured memory would be above the plan by a gigabyte or two without these."""
    rollout = RolloutConfig(prompts_per_step=32, num_generations=8)
    alone, eight = (parts(recipe(rollout=rollout), ranks) for ranks in (1, 8))
    assert "NCCL" not in alone["loss"] and eight["loss"]["NCCL"] == NCCL_BYTES
    # Graphs of 32, 24, 16, 8, 4, 2 and 1 rows, the logits that all write to, and the scratch memory of attention.
    assert eight["loss"]["CUDA graphs"] == 7 * (16 << 20) + 32 * 151_936 * 2 + (72 << 20)
    assert "CUDA graphs" not in parts(recipe(rollout=rollout), 1, CPU)["loss"]
    for phase in eight.values():
        others = ("runtime", "NCCL", "allocator", "keys and values")
        tensors = sum(size for name, size in phase.items() if name not in others)
        assert phase["allocator"] == pytest.approx(0.05 * tensors, abs=1)
    made = Plan(recipe(rollout=rollout), SIZES, batch_plan(recipe(rollout=rollout), 8), 512, GPU)
    largest = max(sum(phase.values()) - sum(phase[name] for name in others[:3]) for phase in eight.values())
    assert made.measurable == largest, "torch counts its tensors only"


def test_the_copy_to_save_is_counted_in_host_memory_and_no_reason_to_refuse():
    moving, off = GrpoConfig(beta=0.1, ref_every=1), CheckpointConfig(asynchronous=False)
    for config, size in [
        (recipe(3), 12 * N // 8),
        (recipe(0, "float32"), 12 * N),
        (recipe(3, grpo=moving), 12 * N // 8 + 2 * N // 8),
        (recipe(3, grpo=replace(moving, ref_mix=0.01)), 12 * N // 8 + 4 * N // 8),
        (recipe(3, checkpoint=off), 0),
        (recipe(3, checkpoint=CheckpointConfig(every_minutes=0)), 0),
    ]:
        plan = Plan(config, SIZES, batch_plan(config, 8), 512, GPU)
        host = {part.name: part.bytes for part in plan.host.parts}
        assert host.get("copy to save", 0) == size == plan.host.bytes - plan.host.least
        said = [line for line in lines(plan) if line.startswith(f"saving: from a copy of {plans.gib(size)} GiB")]
        assert bool(said) == (size > 0)
        here = parts(config, 8, CPU)
        assert here["generation"].get("copy to save", 0) == size and "copy to save" not in here["backward"]


def test_sequences_at_once_are_those_that_the_rest_of_the_memory_holds():
    config = recipe(rollout=RolloutConfig(prompts_per_step=32, num_generations=8, max_completion_tokens=8192))
    # 8,704 tokens are 272 pages of 32, and one to grow into.
    page, seen = 32 * SIZES.token_bytes, []
    for free in (80, 24, 16):
        made = Plan(config, SIZES, batch_plan(config, 1), 512, replace(GPU, device_bytes=free * 10**9))
        cache = parts(config, 1, made.hardware)["generation"]["keys and values"]
        assert (made.sequences * 273 + 2) * page <= cache
        assert made.sequences == 256 or cache < ((made.sequences + 1) * 273 + 2) * page
        seen.append(made.sequences)
    assert seen[0] == 256 > seen[1] > seen[2] > 1


def test_offloaded_states_and_the_reference_are_in_host_memory():
    roomy = replace(recipe(grpo=GrpoConfig(beta=0.1)), engine=EngineConfig(offload_optimizer=True))
    config = replace(roomy, rollout=replace(roomy.rollout, keep_cache="off"))
    made = Plan(config, SIZES, batch_plan(config, 8), 512, GPU)
    host = {part.name: part.bytes for part in made.host.parts}
    owned, padded = N // 8, SIZES.padded // 8
    assert host["reference"] == 2 * padded
    assert (host["float32 masters"], host["Adam's moments"]) == (4 * owned, 8 * owned)
    for phase in made.phases:
        assert not {"float32 masters", "Adam's moments", "reference"} & {part.name for part in phase.parts}
    # A moving average is float32, and the model runs with its rounding.
    for mix, dtype, size, average in ((1.0, "bfloat16", 2, 0), (0.01, "bfloat16", 2, 4), (0.01, "float32", 4, 0)):
        policy, moves = replace(config.policy, dtype=dtype), GrpoConfig(beta=0.1, ref_every=1, ref_mix=mix)
        moving = replace(config, policy=policy, grpo=moves)
        averaged = Plan(moving, SIZES, batch_plan(moving, 8), 512, GPU)
        assert {part.name: part.bytes for part in averaged.host.parts}["reference"] == size * padded + average * owned
    # Where there is room beside the kept cache it is on the GPU, if it does not move.
    moving = replace(roomy, grpo=GrpoConfig(beta=0.1, ref_every=1))
    room = int(Plan(roomy, SIZES, batch_plan(roomy, 8), 512, GPU).peak.bytes / KEPT_BELOW) + 1
    cases = ((roomy, room, True), (roomy, room - owned, False), (moving, room, False), (config, room, False))
    for of, room, refers in cases:
        made = Plan(of, SIZES, batch_plan(of, 8), 512, replace(GPU, device_bytes=room))
        assert made.refers == refers == ("on the GPU" in str(made)) and made.keeps == (of is not config)
        assert ("reference" in {part.name for part in made.host.parts}) != refers
        assert {part.name: part.bytes for part in made.peak.parts}.get("reference", 0) == 2 * owned * refers
    # Of adapters the reference is the model without them.
    adapted = replace(config, lora=LoraConfig(rank=8))
    assert "reference" not in {part.name for part in Plan(adapted, SIZES, batch_plan(adapted, 8), 512, GPU).host.parts}


def test_states_between_steps_leave_their_memory_to_rollouts_and_training():
    config = recipe(rollout=RolloutConfig(prompts_per_step=32, num_generations=8, max_completion_tokens=8192))
    small = replace(GPU, device_bytes=16 << 30)
    plain = Plan(config, SIZES, batch_plan(config, 2), 512, small)
    parked = with_settings(plain, {"engine.offload_optimizer": "between_steps"})
    assert parked is not None and parked.lacking is None and parked.sequences > plain.sequences
    assert f"tokens at once; {parked.sequences} with engine.offload_optimizer between_steps" in "\n".join(lines(plain))
    away = {"float32 masters": 4 * (N // 2), "Adam's moments": 8 * (N // 2)}
    for phase in parked.phases:
        states = {part.name: part.bytes for part in phase.parts if part.name in away}
        assert states == (away if phase.name == "optimizer step" else {})
    host = {part.name: part.bytes for part in parked.host.parts}
    assert (host["float32 masters"], host["Adam's moments"]) == (1 << 30, 2 << 30), "0.99 GB are pinned as 2^30 bytes"
    theirs = EngineConfig(deepspeed={"zero_optimization": {"offload_optimizer": {"device": "cpu"}}})
    for made in (parked, replace(plain, config=replace(config, engine=theirs))):
        assert "at once; " not in "\n".join(lines(made))


def test_pinned_memory_is_a_power_of_two():
    """3B took 17.2 GB for its masters, of 12.3 planned; at stage 2, bfloat16 gradients stay until the step."""
    count, zero = 3_085_938_688, "zero_optimization"
    sizes = replace(SIZES, parameters=count, trained=count, padded=4 << 30)

    def host(stage: int, **more: object) -> tuple[dict[str, int], Part]:
        engine = EngineConfig(zero_stage=stage, offload_optimizer=True, deepspeed={zero: more})
        config = replace(recipe(), engine=engine)
        made = Plan(config, sizes, batch_plan(config, 1), 512, GPU)
        return {part.name: part.bytes for part in made.host.parts}, gradients(made)

    of_tensor, bucket = 2 * SIZES.largest, 2 * 500_000_000
    seen, on_gpu = host(2)
    assert (seen["float32 masters"], seen["Adam's moments"]) == (1 << 34, 8 * count)
    # The gradients, the new weights in bfloat16, and the largest gradient on its way.
    assert seen["offloaded gradients"] == (1 << 34) + (1 << 33) + (1 << 29) and 1 << 28 < of_tensor <= 1 << 29
    assert on_gpu.bytes == bucket + of_tensor + 4 * count and on_gpu.remedy.startswith("engine.zero_stage 3, ")
    pageable, _ = host(2, offload_optimizer={"pin_memory": False})
    assert pageable["float32 masters"] == 4 * count and pageable["offloaded gradients"] == 6 * count + of_tensor
    # ZeRO-3 has its masters in pageable memory, and steps groups of 10^9 elements; the last one has 85,938,688.
    seen, on_gpu = host(3, offload_param={"device": "cpu"})
    assert (seen["float32 masters"], on_gpu.bytes) == (4 * count, bucket)
    assert seen["offloaded gradients"] == (1 << 34) + 3 * (1 << 32) + (1 << 29)
    assert seen["weights"] == (8 << 30) + (1 << 33), "every tensor was in pinned memory before"


def test_activations_take_half_as_much_again_on_a_cpu_and_stay_when_freed():
    cpu, gpu = parts(recipe(), 1, CPU), parts(recipe(), 1)
    assert {cpu[phase]["activations"] for phase in cpu} == {1200}, "freed memory stays with the process"
    assert gpu["loss"]["activations"] == 800 and "activations" not in gpu["generation"]
    assert cpu["export"]["copy to write"] == 2 * N and "copy to write" not in gpu["export"]


def test_memory_is_not_kept_on_request_where_nothing_can_be_planned(monkeypatch):
    def fail(*_, **__):
        raise NeedsData

    monkeypatch.setattr(plans, "measure", fail)
    monkeypatch.setattr(plans, "load_config", lambda _: None)
    config = recipe(rollout=RolloutConfig(keep_cache="on"))
    assert plans.estimate(recipe(), batch_plan(config, 1), 512, GPU) is None
    with pytest.raises(UserError, match=r"^rollout.keep_cache on needs a plan of memory, .*: set it to auto$"):
        plans.estimate(config, batch_plan(config, 1), 512, GPU)


def test_the_cache_that_is_sized_from_free_memory_is_no_reason_to_refuse():
    config = recipe(rollout=RolloutConfig(max_completion_tokens=8192))
    tight = replace(GPU, device_bytes=20 << 30)
    made = Plan(config, SIZES, batch_plan(config, 1), 512, tight)
    assert made.peak.name == "generation" and 0.9 * (20 << 30) < made.peak.bytes <= 0.97 * (20 << 30)
    assert shortage(made) is None
    wants = replace(config, rollout=replace(config.rollout, cache_gb=16.0))
    with pytest.raises(UserError, match=r"rollout\.cache_gb"):
        shortage(Plan(wants, SIZES, batch_plan(wants, 1), 512, tight))


def test_the_memory_of_decoding_is_kept_where_training_has_room_beside_it():
    config = recipe()
    batch, rows = batch_plan(config, 8), 32
    made = Plan(config, SIZES, batch, 512, GPU, held_out=1000)
    # 32 pages of 32 and one to grow into, for the 125 held-out prompts of a rank, which are more than its rows.
    cache = (125 * 33 + 2) * 32 * SIZES.token_bytes
    # Graphs of 125, 96, 64, 48, 32, 24, 16, 8, 4, 2 and 1 rows, the logits of the largest, and attention's scratch.
    graphs = 125 * SIZES.vocabulary * 2 + 11 * (16 << 20) + (72 << 20)
    for phase in made.phases:
        held = {part.name: part.bytes for part in phase.parts}
        names = ("keys and values", "CUDA graphs", "gathered weights")
        assert [held.get(name) for name in names] == [cache, graphs, 2 * N], phase.name
    kept = made.workspace()
    assert kept is not None and (kept.slots, kept.tokens) == (125, 1024)
    # Evaluations with longer completions have their room too, and do not change what a step is.
    longer = Plan(config, SIZES, batch, 512, GPU, held_out=1000, held_out_longest=2048)
    kept = longer.workspace()
    assert kept is not None and kept.tokens == 2048 and longer.longest == 1024 and longer.pages == 2 * made.pages
    assert "stays during training" in str(made) and "the cache stays" in "\n".join(lines(made))

    # Where free memory is short, decoding gives back what training needs: the run fits as if nothing could be kept.
    for free in (made.peak.bytes / 0.86, 0.8 * made.peak.bytes):
        tight = replace(GPU, device_bytes=int(free))
        off = replace(config, rollout=replace(config.rollout, keep_cache="off"))
        plans = [Plan(c, SIZES, batch, 512, tight, held_out=1000) for c in (config, off)]
        assert plans[0].workspace() is None and plans[0].phases == plans[1].phases
        assert "keys and values" not in {part.name for part in plans[0].phases[1].parts}
        assert plans[0].slots == rows
    on = replace(config, rollout=replace(config.rollout, keep_cache="on"))
    with pytest.raises(UserError, match=r"does not fit: .* rollout\.keep_cache off"):
        shortage(Plan(on, SIZES, batch, 512, tight, held_out=1000))
    assert Plan(on, SIZES, batch, 512, CPU).workspace() is None


def test_time_is_products_at_full_speed_or_weights_read_once_a_step():
    rollout = RolloutConfig(prompts_per_step=1, num_generations=8, max_completion_tokens=100)
    config = recipe(rollout=rollout, grpo=GrpoConfig(beta=0.1, num_iterations=2))
    seconds = step_seconds(Plan(config, SIZES, batch_plan(config, 1), 512, GPU))
    product = 2 * N / 1e14
    step = (2 * N + 8 * (512 + 50) * SIZES.token_bytes) / 1e12
    assert seconds["generation"] == pytest.approx(512 * product + 100 * step)
    assert seconds["training"] == pytest.approx(8 * 612 * product * 3 * 2)
    assert seconds["reference"] == pytest.approx(8 * 612 * product)


def test_qwen2_0_5b_is_measured_as_it_is():
    shape = {"hidden_size": 896, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
    model = Qwen2Config(vocab_size=151_936, num_hidden_layers=24, tie_word_embeddings=True, **shape)
    config = replace(recipe(), policy=PolicyConfig(micro_batch_tokens=1024))
    sizes = measure(config, model, batch_plan(config, 1), 512, on_gpu=False)
    assert (sizes.parameters, sizes.active, sizes.token_bytes) == (N, N, SIZES.token_bytes)
    assert sizes.largest == SIZES.largest
    # The head: its gradient in bfloat16, and of logits a few tiles.
    tile = 4 * 1024 * TILE_COLUMNS
    assert 2 * SIZES.largest < sizes.training.head < 2 * SIZES.largest + 4 * tile
    text = "\n".join(lines(Plan(config, sizes, batch_plan(config, 1), 512, of_table("h100"))))
    assert "494,032,768 parameters" in text and "Adam's moments" in text


def test_a_container_s_limit_bounds_what_is_free(monkeypatch, tmp_path):
    limit, used = tmp_path / "memory.max", tmp_path / "memory.current"
    limit.write_text("1000000\n")
    used.write_text("400000\n")
    (tmp_path / "memory.stat").write_text("anon 5\ninactive_file 100000\n")
    monkeypatch.setattr(hardware_module, "_CGROUPS", ((limit, used),))
    assert host_free_bytes() == 700_000
    limit.write_text("max\n")
    assert host_free_bytes() > 1_000_000
    here = of_device(torch.device("cpu"), "float32")
    assert here.flops > 1e8 and here.bandwidth > 1e7 and not here.on_gpu


@pytest.mark.process
def test_the_command_prints_the_plan_of_ranks_and_devices_that_are_not_here(tmp_path: Path):
    make_task(tmp_path)
    settings = {
        "policy.model": tmp_path / "model", "data.path": tmp_path / "train.jsonl",
        "rewards": "[{function: exact_match}]", "rollout.max_completion_tokens": 8, "plan.world_size": 4,
        "plan.gpu": "l40s",
    }  # fmt: skip

    options = [part for name, value in settings.items() for part in (f"--{name}", str(value))]
    done = forks.run("-m", "hybrid_grpo", "plan", *options)
    assert done.status == 0, done.err
    for words in ("batch: 4 ranks x 8 prompts", "on l40s", "optimizer step", "keys and values", "it fits"):
        assert words in done.out
    assert not list(tmp_path.glob("runs/*")), "a plan leaves no run behind"
