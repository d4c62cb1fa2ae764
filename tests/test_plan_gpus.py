"""The table of models and GPUs in docs/memory.md: its facts, and that it is what the plan says today."""

import json
import sys
from dataclasses import replace
from functools import cache

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM

from hybrid_grpo.commands.memory.shortage import shortage
from hybrid_grpo.commands.plan import SHAPES, known_config
from hybrid_grpo.config import BatchPlan, TrainConfig
from hybrid_grpo.config.checks import batch_plan, check_train
from hybrid_grpo.run.memory.dry_run import Footprint, Sizes, largest_micro_batch

sys.path.append(str(ROOT / "benchmarks"))

import plan_gpus
import plan_grid
import small_gpus


def test_every_shape_has_the_parameters_that_its_card_names():
    results = json.loads(plan_gpus.RESULTS.read_text())
    for name, values in SHAPES.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(known_config(f"owner/{name}-Instruct-v0.2"))
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(values["billions"] * 1e9, rel=0.015), name
        assert count == results.get(name, {"parameters": count})["parameters"]


def test_the_table_is_what_the_plan_says():
    """One row of the file is planned anew, of a model that needs several GPUs."""
    results = json.loads(plan_gpus.RESULTS.read_text())
    assert list(results) == list(plan_gpus.MODELS)
    again = "python benchmarks/plan_gpus.py --json benchmarks/results/plan_gpus.json --docs docs/memory.md"
    assert plan_gpus.plans(plan_gpus.MODELS["Qwen2.5-7B"]) == results["Qwen2.5-7B"], f"run {again}"
    page = (ROOT / "docs/memory.md").read_text()
    assert page == plan_gpus.replaced(page, plan_gpus.table(results))
    readme = (ROOT / "README.md").read_text()
    rows = [line for line in readme.splitlines() if line.startswith(("| Qwen", "| model | 24 GB"))]
    assert len(rows) == 3 and all(row in page for row in rows)
    seven = results["Qwen2.5-7B"]["fits"]
    assert seven["24"]["on the GPU"] is None and seven["80"]["on the GPU"]["gpus"] == 4
    assert plan_gpus.table(results).count("\n| Qwen2.5-7B |") == 1


def rows_of(page: str) -> list[tuple[str, list[str]]]:
    """The rows of the table of small GPUs: what follows the script's name, and the number of GPUs by column."""
    table = page.partition("<!-- small_gpus -->")[2].partition("<!-- end -->")[0]
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.strip().splitlines()]
    assert rows[0][1:-1] == list(small_gpus.CARDS)
    return [(first.strip("`"), cells[:-1]) for first, *cells in rows[2:]]


def test_every_command_for_a_small_gpu_fits_it_in_every_phase():
    """The table is walked: each row's recipe, planned for each GPU of each column on as many as the cell says."""
    results = json.loads(small_gpus.RESULTS.read_text())
    page = (ROOT / "docs/memory.md").read_text()
    again = "python benchmarks/small_gpus.py --json benchmarks/results/small_gpus.json --docs docs/memory.md"
    assert page == plan_gpus.replaced(page, small_gpus.table(results), "small_gpus"), f"run {again}"
    planned = 0
    for command, cells in rows_of(page):
        model, _, words = command.partition(" ")
        config, sizes = small_gpus.config_of(model, words), small_gpus.saved_sizes(results[command])
        assert bool(config.lora.rank) == ("lora" in words) and config.engine.offload_optimizer == ("offload" in words)
        for cell, gpus in zip(cells, small_gpus.CARDS.values(), strict=True):
            for gpu in gpus if cell != "-" else ():
                check_train(config, int(cell))
                plan = small_gpus.plan_of(config, sizes, gpu, int(cell))
                assert shortage(plan) is None and plan.sequences >= 16, (command, gpu)
                for phase in plan.phases:
                    assert phase.bytes <= 0.97 * plan.hardware.device_bytes, (command, gpu, phase.name)
                planned += 1
    assert planned > 65
    on_one = {command.split("-")[1] for command, cells in rows_of(page) if cells[0] == "1"}
    assert on_one == {"1.5B", "3B", "7B", "14B"}


def test_the_sizes_behind_these_plans_are_those_of_a_dry_run_today():
    model = "Qwen/Qwen2.5-1.5B-Instruct"
    saved = small_gpus.saved_sizes(json.loads(small_gpus.RESULTS.read_text())[f"{model} lora"])
    today = plan_gpus.sizes_of(small_gpus.SHAPES[model], small_gpus.config_of(model, "lora"), 512)
    assert saved == today, "run benchmarks/small_gpus.py"


def roughly(shape: plan_gpus.Shape) -> Sizes:
    """The sizes of a model by its shapes, since a dry run of every one takes minutes."""
    hidden, layers, vocabulary = shape["hidden_size"], shape["num_hidden_layers"], shape["vocab_size"]
    count, token = int(shape["billions"] * 1e9), 2 * (3 * shape["intermediate_size"] + 6 * hidden)
    kept = Footprint(8192 * 2 * hidden * layers, 1 << 30, 8192 * 3 * token)
    cached = layers * 2 * 2 * shape["num_key_value_heads"] * hidden // shape["num_attention_heads"]
    return Sizes(count, count, vocabulary * hidden, count, vocabulary, cached, kept, token, tokens=8192)


def rough_dry_run(shape: plan_gpus.Shape) -> plan_grid.Measured:
    """As a dry run, from `roughly`, in which the layers keep 14 times as much without gradient checkpointing."""
    whole = roughly(shape)

    @cache
    def tokens(budget: int | None) -> int:
        config = plan_gpus.recipe(False)
        config = replace(config, policy=replace(config.policy, micro_batch_tokens=budget))
        micro = largest_micro_batch(config, batch_plan(config, 8), plan_gpus.PROMPT, packs=True, on_gpu=True)
        return micro.input_ids_bS.numel()

    def measured(config: TrainConfig, batch: BatchPlan) -> Sizes:
        kept = whole.training.kept * (1 if config.policy.gradient_checkpointing else 14)
        trained = whole.parameters // 100 if config.lora.rank else whole.parameters
        sizes = replace(whole, trained=trained, training=replace(whole.training, kept=kept))
        return sizes.of_tokens(tokens(config.policy.micro_batch_tokens), 2)

    return measured


def test_what_a_plan_says_is_so():
    """The cache took nine tenths of what was free, and a prefill of 16,384 tokens did not fit into the rest: 1.5B on
    two GPUs of 24 GB lacked 0.7 GiB, 7B on eight of 40 GB 1.8. And a refusal named settings each of which helped, but
    not which of them together. `benchmarks/plan_grid.py` asks the same of all models, by real dry runs."""
    models = {name: rough_dry_run(plan_gpus.MODELS[name]) for name in ("Qwen2.5-0.5B", "Qwen2.5-7B", "Qwen2.5-14B")}
    says: dict[str, int] = {}
    for case, (what, settings, errors) in plan_grid.grid(models, ["rtx4090", "l40s", "h200"], (1, 8)):
        says[what] = says.get(what, 0) + 1
        assert not errors, (case, what, settings, errors)
    assert min(says["fits"], says["fits with settings"], says["does not fit"]) >= 8, says
