"""The table of models and GPUs in docs/memory.md: its facts, and that it is what the plan says today."""

import itertools
import json
import sys
from dataclasses import replace

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM

from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.model.hardware import GPUS, of_table
from hybrid_grpo.run.memory.dry_run import Footprint, Sizes
from hybrid_grpo.run.memory.plan import Plan

sys.path.append(str(ROOT / "benchmarks"))

import plan_gpus


def test_every_shape_has_the_parameters_that_its_card_names():
    for name, shape in plan_gpus.MODELS.items():
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(shape.config)
        count = sum(parameter.numel() for parameter in model.parameters())
        assert count == pytest.approx(shape.billions * 1e9, rel=0.015), name
        assert count == json.loads(plan_gpus.RESULTS.read_text())[name]["parameters"]


def test_the_tables_are_what_the_plan_says():
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
    assert plan_gpus.table(results).count("\n| Qwen2.5-7B |") == 3


def roughly(shape: plan_gpus.Shape) -> Sizes:
    """The sizes of a model by its shapes, since a dry run of every one takes minutes."""
    count, token = int(shape.billions * 1e9), 2 * (3 * shape.inner + 6 * shape.hidden)
    kept = Footprint(8192 * 2 * shape.hidden * shape.layers, 1 << 30, 8192 * 3 * token)
    cached = shape.layers * 2 * 2 * shape.kv_heads * shape.head_dim
    return Sizes(count, count, shape.vocabulary * shape.hidden, count, shape.vocabulary, cached, kept, token)


def test_what_a_plan_accepts_fits_in_every_phase():
    """The cache took nine tenths of what was free, and a prefill of 16,384 tokens did not fit into the rest: 1.5B on
    two GPUs of 24 GB lacked 0.7 GiB, 7B on eight of 40 GB 1.8. So with the default prefill, cached or kept."""
    accepted = 0
    for shape in plan_gpus.MODELS.values():
        configs = [
            replace(config, rollout=replace(config.rollout, prefill_tokens=None))
            for config in map(plan_gpus.recipe, (False, True))
        ]
        sizes = roughly(shape)
        for config, gpu, ranks in itertools.product(configs, GPUS, plan_gpus.RANKS):
            plan = Plan(config, sizes, batch_plan(config, ranks), plan_gpus.PROMPT, of_table(gpu))
            if max(phase.least for phase in plan.phases) <= plan.hardware.device_bytes:
                accepted += 1
                assert plan.peak.bytes <= plan.hardware.device_bytes, (shape, gpu, ranks)
    assert accepted > 150
