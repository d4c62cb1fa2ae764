"""Text models of checkpoints with towers for pictures: how they are made, and what their export holds."""

import json
import re
import shutil
import warnings
from pathlib import Path

import forks
import huggingface_hub.constants
import peft
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText
from whole_models import OTHER_FILES, make_whole, tensors

from hybrid_grpo.config import LoraConfig, PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.export import Original
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.loading import add_adapter, load_config, load_model, parameters_of, weights_fact
from hybrid_grpo.model.lora import Adapters
from hybrid_grpo.model.towers import has_tower, loader

TOWER = re.compile(r"visual|vision_tower|multi_modal_projector")


def original_of(folder):
    model = load_model(PolicyConfig(model=str(folder), dtype="float32"))
    return model, Original(model, str(folder))


@pytest.mark.parametrize("name, dtype", [
    ("gemma3", torch.float32),  # a tied head; files name the text model first, and its class the other way around
    ("glm4v_moe", torch.float32),  # experts apart in the files
    ("qwen2_vl", torch.bfloat16),  # files of older versions do not name the text model
    ("qwen3_vl_moe", torch.bfloat16),  # experts transposed in the files
])  # fmt: skip
def test_an_export_is_the_checkpoint_with_the_trained_weights_in_their_places(name, dtype, tmp_path):
    start, out = tmp_path / "start", tmp_path / "out"
    make_whole(name, start, dtype)
    check_files(str(start), load_config(str(start)))
    (start / "additional_chat_templates").mkdir()
    (start / "additional_chat_templates/rag.jinja").write_text("kept")
    model, original = original_of(start)
    trained = {weight: -tensor for weight, tensor in model.state_dict().items()}
    assert not any(TOWER.search(weight) for weight in trained)
    original.export(trained, out)
    before, after = tensors(start), tensors(out)
    assert before.keys() == after.keys()
    for weight, (file, tensor) in before.items():
        assert (after[weight][0], after[weight][1].dtype) == (file, dtype)
        assert torch.equal(after[weight][1], tensor if TOWER.search(weight) else -tensor), weight
    for path in filter(Path.is_file, start.rglob("*")):
        same = path.read_bytes() == (out / path.relative_to(start)).read_bytes()
        assert same or path.suffix == ".safetensors", path
    whole = AutoModelForImageTextToText.from_pretrained(out, dtype=torch.float32)
    for weight, tensor in whole.state_dict().items():
        assert weight not in trained or torch.equal(tensor, trained[weight]), weight


@pytest.mark.parametrize("transposed", [False, True])
def test_experts_come_back_as_they_lie_in_the_files(transposed, tmp_path):
    """Qwen3-VL as it was released has them transposed, which transformers sees by their shapes and does not undo; under
    ZeRO-3 it transposed them always, since a sharded parameter is empty."""
    make_whole("qwen3_vl_moe", tmp_path, moe_intermediate_size=24)
    for file in tmp_path.glob("*.safetensors") if transposed else ():
        held = {name: of.mT.contiguous() if ".experts." in name else of for name, of in load_file(file).items()}
        save_file(held, file, {"format": "pt"})
    check_files(str(tmp_path), load_config(str(tmp_path)))
    model, original = original_of(tmp_path)
    trained = {weight: -tensor for weight, tensor in model.state_dict().items()}
    original.export(trained, tmp_path / "out")
    before, after = tensors(tmp_path), tensors(tmp_path / "out")
    experts = [weight for weight in before if ".experts." in weight]
    assert len(experts) == 8 and all(torch.equal(after[weight][1], -before[weight][1]) for weight in experts)
    again, _ = original_of(tmp_path / "out")
    assert all(torch.equal(tensor, trained[weight]) for weight, tensor in again.state_dict().items())
    for parameter in model.parameters():
        parameter.ds_shape, parameter.data = parameter.shape, torch.empty(0)
    assert model.get_parameter("model.language_model.layers.0.mlp.experts.down_proj").shape == (8, 32, 24)


def test_names_of_the_other_layout_come_back_too(tmp_path):
    """Gemma 3 saved by some versions of transformers has the names of its class in its files."""
    make_whole("gemma3", tmp_path)
    renamed = {
        re.sub(r"^(?!language_model)", "model.", weight).replace("language_model.model.", "model.language_model."): of
        for weight, (_, of) in tensors(tmp_path).items()
    }
    for file in (*tmp_path.glob("*.safetensors"), tmp_path / "model.safetensors.index.json"):
        file.unlink()
    save_file(renamed, tmp_path / "model.safetensors", {"format": "pt"})
    model, original = original_of(tmp_path)
    original.export(model.state_dict(), tmp_path / "out")
    after = tensors(tmp_path / "out")
    assert after.keys() == renamed.keys() and all(torch.equal(after[weight][1], renamed[weight]) for weight in renamed)


def test_the_tower_is_neither_counted_nor_loaded_and_the_run_says_so(tmp_path):
    make_whole("qwen3_vl", tmp_path)
    model, whole = original_of(tmp_path)[0], AutoModelForImageTextToText.from_pretrained(tmp_path)
    count = sum(parameter.numel() for parameter in model.parameters())
    tower = sum(parameter.numel() for parameter in whole.model.visual.parameters())
    assert parameters_of(str(tmp_path)) == count == sum(p.numel() for p in whole.parameters()) - tower
    assert "is not trained" in weights_fact(PolicyConfig(model=str(tmp_path)))["tower"]


def test_an_adapter_fits_the_whole_model_and_leaves_the_tower_alone(tmp_path):
    """Gemma 3's tower has layers q_proj and v_proj too, which peft would adapt by these names."""
    make_whole("gemma3", tmp_path / "start")
    model, _ = original_of(tmp_path / "start")
    adapters = Adapters(model, LoraConfig(rank=2, target_modules=["q_proj", "v_proj"]), seed=0)
    with torch.no_grad():
        for parameter in adapters.parameters:
            parameter.normal_()
    adapters.save(tmp_path / "adapter", {parameter: parameter for parameter in adapters.parameters})
    whole = AutoModelForImageTextToText.from_pretrained(tmp_path / "start")
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*missing adapter keys")
        adapted = peft.PeftModel.from_pretrained(whole, tmp_path / "adapter")
    assert not any("lora" in weight for weight, _ in adapted.named_parameters() if TOWER.search(weight))
    ids = torch.tensor([[3, 14, 15, 9, 26]])
    expected = model(input_ids=ids).logits
    torch.testing.assert_close(adapted(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)
    add_adapter(merged := original_of(tmp_path / "start")[0], str(tmp_path / "adapter"))
    torch.testing.assert_close(merged(input_ids=ids).logits, expected, rtol=1e-4, atol=1e-4)


def test_a_checkpoint_on_the_hub_is_exported_from_its_cache(tmp_path, monkeypatch):
    make_whole("qwen3_vl", tmp_path / "made")
    snapshot = tmp_path / "models--me--see/snapshots/0a"
    shutil.copytree(tmp_path / "made", snapshot)
    (tmp_path / "models--me--see/refs").mkdir()
    (tmp_path / "models--me--see/refs/main").write_text("0a")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    model, _ = original_of(snapshot)
    Original(model, "me/see").export(model.state_dict(), tmp_path / "out")
    assert {path.name for path in (tmp_path / "out").iterdir()} == {path.name for path in snapshot.iterdir()}
    with pytest.raises(UserError, match=r"^policy.model me/hear: its files for pictures do not load from the hub"):
        Original(model, "me/hear")


def test_what_could_not_be_exported_is_refused_in_a_line(tmp_path, monkeypatch):
    make_whole("qwen3_vl", tmp_path / "start")
    model, original = original_of(tmp_path / "start")
    shutil.move(tmp_path / "start", tmp_path / "moved")
    with pytest.raises(UserError, match=r"start is gone or has no safetensors, of which an export exchanges"):
        original.export(model.state_dict(), tmp_path / "out")
    (tmp_path / "pickled").mkdir()
    with pytest.raises(UserError, match=r"pickled is gone or has no safetensors, .* save it as safetensors"):
        Original(model, str(tmp_path / "pickled"))
    monkeypatch.setattr(
        "hybrid_grpo.model.export.revert_weight_conversion", lambda _, of: {f"x.{n}": t for n, t in of.items()}
    )
    with pytest.raises(
        UserError, match=r"63 of its weights would get other names or shapes when they are exported, x.lm_head"
    ):
        Original(model, str(tmp_path / "moved"))


def test_a_text_model_alone_is_not_taken_for_a_part(tmp_path):
    assert has_tower(AutoConfig.for_model("qwen3_5"))
    assert has_tower(AutoConfig.for_model("qwen3_5", architectures=["Qwen3_5ForConditionalGeneration"]))
    assert has_tower(AutoConfig.for_model("fuyu", architectures=["FuyuForCausalLM"]))
    for alone in (
        AutoConfig.for_model("qwen3_5", architectures=["Qwen3_5ForCausalLM"]),
        AutoConfig.for_model("qwen3_5_text"),
    ):
        assert not has_tower(alone) and loader(alone) is AutoModelForCausalLM


@pytest.mark.process
@pytest.mark.ranks
def test_two_ranks_train_the_text_and_export_the_whole(tmp_path):
    """As a user would, under ZeRO-3: the log-probabilities at the start are those of the whole model."""
    start, out = tmp_path / "start", tmp_path / "runs/see/model"
    make_whole("qwen3_vl_moe", start, moe_intermediate_size=24)
    (tmp_path / "rows.jsonl").write_text('{"prompt": "ab"}\n' * 4)
    (tmp_path / "kinds.py").write_text(
        "def kinds(completions, **_):\n    return [len(set(text)) / 8 for text in completions]"
    )
    settings = {
        **{"run.name": "see", "run.dir": "runs", "run.steps": 2, "policy.model": start, "policy.dtype": "float32"},
        **{"policy.lr": 1e-2, "engine.zero_stage": 3, "data.path": "rows.jsonl", "log.wandb": "disabled"},
        **{"rollout.prompts_per_step": 4, "rollout.num_generations": 4, "rollout.max_completion_tokens": 8},
        "rewards": "[{function: kinds.py:kinds}]",
    }
    arguments = [f"--{name}={value}" for name, value in settings.items()]
    done = forks.run("-m", "hybrid_grpo", "train", *arguments, world=2, cwd=tmp_path)
    assert done.status == 0, done.out[-3000:] + done.err[-3000:]
    assert "weights: as in transformers' own model" in done.out + done.err
    steps = [json.loads(line) for line in (tmp_path / "runs/see/metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 2 and all(step["policy/grad_norm"] and "policy/frozen_tensors" not in step for step in steps)
    before, after = tensors(start), tensors(out)
    assert before.keys() == after.keys()
    for weight, (file, tensor) in before.items():
        assert after[weight][0] == file
        # A bias of keys has no gradient.
        assert torch.equal(after[weight][1], tensor) == bool(TOWER.search(weight)) or "k_proj.bias" in weight, weight
    assert {path.name for path in out.iterdir()} >= {path.name for path in start.iterdir()} >= OTHER_FILES.keys()
    _, noted = AutoModelForImageTextToText.from_pretrained(out, output_loading_info=True)
    assert not any(noted.values())
