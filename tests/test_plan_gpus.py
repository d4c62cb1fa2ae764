"""The table of models and GPUs in docs/memory.md: its facts, and that it is what the plan says today."""

import json
import sys

import pytest
import torch
from paths import ROOT
from transformers import AutoModelForCausalLM

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
