"""Adapters: beside a model and merged into it, on their own; then in the engine, on one and on two ranks."""

import shutil
from copy import deepcopy

import forks
import pytest
import torch
from launching import assert_same_steps, make_task, ranks
from peft import PeftModel
from safetensors.torch import load_file
from tiny_models import build, in_full, tiny_config
from transformers import AutoModelForCausalLM

from hybrid_grpo.config import LoraConfig, PolicyConfig, TrainConfig
from hybrid_grpo.config.checks import check_train
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.generation import GREEDY, Request, Sampling, generate
from hybrid_grpo.generation.cache import PagedCache
from hybrid_grpo.generation.cpu_step import CpuStep
from hybrid_grpo.generation.fused_step import fused_step
from hybrid_grpo.generation.shape_probe import geometry_of
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.flops import Cost
from hybrid_grpo.model.gathered_weights import View, meta_copy, whole_shape
from hybrid_grpo.model.kernels import build as build_kernels
from hybrid_grpo.model.loading import load_model
from hybrid_grpo.model.lora import Adapters, check_lora
from hybrid_grpo.run.memory.dry_run import DryRun

LORA = LoraConfig(rank=4, alpha=8)
IDS = torch.arange(1, 41).reshape(2, 20)


def adapted(architecture, lora=LORA):
    """A model, the same with adapters whose B is random, and these."""
    base = build(tiny_config(architecture))
    model = deepcopy(base)
    adapters = Adapters(model, lora, seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for adapter in adapters.by_layer.values():
            adapter.up.normal_(std=0.3, generator=generator)
    return base, model, adapters


def view_of(model, adapters, keep=False, **options):
    view, cpu = meta_copy(model, ATTENTION).eval(), torch.device("cpu")
    return View(model, view, False, cpu, adapters.by_layer, keep, **options)


def greedy(model):
    """Twelve tokens after each of three prompts."""
    requests = [Request(prompt, [0]) for prompt in ([1, 2, 3], [7] * 11, [40])]
    return [group[0].token_ids for group in generate(model, requests, Sampling(12, temperature=GREEDY))[0]]


@pytest.mark.parametrize("architecture", ["qwen2", "gpt2", "qwen3_moe", "gemma2", "deepseek_v3"])
def test_what_is_decoded_is_the_model_that_peft_merges_from_what_is_saved(architecture, tmp_path):
    """GPT-2 keeps weights transposed; Gemma's head is its embedding; the experts of the MoE have no adapters."""
    base, model, adapters = adapted(architecture)
    before = {name: p.clone() for name, p in model.named_parameters()}
    adapters.save(tmp_path, {p: p.data for p in adapters.parameters})
    view, beside = view_of(model, adapters), view_of(model, adapters, weights="unmerged")
    view.gather()
    beside.gather()
    with torch.no_grad():
        theirs = PeftModel.from_pretrained(deepcopy(base), tmp_path)
        assert torch.equal(theirs(IDS).logits, model(IDS).logits)
        merged = theirs.merge_and_unload()
        assert not torch.allclose(merged(IDS).logits, base(IDS).logits, atol=0.1)
    for name, weight in merged.state_dict().items():
        torch.testing.assert_close(view.module.state_dict()[name], weight, rtol=1e-6, atol=1e-6)
    merged.set_attn_implementation(ATTENTION)
    if architecture == "qwen2" and build_kernels.usable(*model.parameters()):
        step = fused_step(beside.module, PagedCache(geometry_of(beside.module), 2, 32, torch.device("cpu")))
        assert type(step) is CpuStep, "adapters are no reason to go layer by layer"
    assert greedy(view.module) == greedy(beside.module) == greedy(merged)
    copied, exported = view.module.state_dict(), beside.merged().state_dict()
    assert copied.keys() == exported.keys() and all(torch.equal(exported[name], copied[name]) for name in copied)
    dry = DryRun(tiny_config(architecture), PolicyConfig(dtype="float32"), LORA)
    bytes_, _ = dry.cache_bytes(paged=True, unmerged=True)
    assert geometry_of(beside.module).token_bytes == pytest.approx(bytes_, rel=0.02)
    view.release()
    beside.release()
    assert all(p.numel() == 0 for p in view.module.parameters())
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


@pytest.mark.parametrize(("architecture", "targets"), [
    ("qwen2", "all-linear"), ("gemma2", ["q_proj", "down_proj"]), ("qwen3_moe", ["o_proj"]), ("qwen3_next", ["q_proj"]),
    ("phi", "all-linear"),
])  # fmt: skip
@pytest.mark.parametrize("kept", [False, True])
def test_weights_in_four_bits_are_decoded_as_the_same_numbers_in_full(architecture, targets, kept, tmp_path):
    """Whichever layers have adapters, as neighbors or not, in memory that is kept or not; then packed again."""
    config = tiny_config(architecture, 64, pad_token_id=60)  # whose embedding trains nothing
    lora = LoraConfig(rank=4, alpha=8, target_modules=targets, load_in_4bit=True)
    build(config).save_pretrained(tmp_path)
    packed = load_model(PolicyConfig(model=str(tmp_path), dtype="float32"), "eager", four_bits=True)
    full, views, trained, seen = in_full(packed), [], [], []
    for model in (packed, full):
        adapters = Adapters(model, lora, seed=1)
        torch.manual_seed(2)
        trained += [adapter.up.data.normal_(std=0.3) for adapter in adapters.by_layer.values()]
        views += [view_of(model, adapters, kept, neighbors=kept), view_of(model, adapters, kept, weights="unmerged")]
    view, beside, full_view, _ = views
    assert torch.allclose(packed(IDS).logits, full(IDS).logits, atol=1e-5)
    every = [p for p in packed.parameters() if hasattr(p, "quant_state")]
    four_bits = [p for p in packed.model.layers.parameters() if hasattr(p, "quant_state")]
    before = [p.clone() for p in every]
    for _ in range(2):
        view.gather()
        full_view.gather()
        ours, theirs = view.module.state_dict(), full_view.module.state_dict()
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
        view.release()  # while they are there in full, the packed weights may be away
        beside.gather()
        assert greedy(beside.module) == greedy(full_view.module)
        exported = beside.merged().state_dict()
        assert all(torch.equal(exported[name], theirs[name]) for name in theirs)
        seen.append(ours)  # held, so that new memory cannot come to an old address by chance
        full_view.release()
        beside.release()
        assert all(map(torch.equal, every, before))
        for up in trained:
            up.add_(0.1)
    addresses = [[weight.data_ptr() for weight in weights.values()] for weights in seen]
    assert (addresses[0] == addresses[1]) == kept
    dry = DryRun(config, PolicyConfig(dtype="float32"), lora)
    assert dry.tables == sum(p.numel() for p in every) - sum(p.numel() for p in four_bits) > 0
    assert sum(dry.linear) == sum(whole_shape(p).numel() for p in four_bits) == 2 * sum(p.numel() for p in four_bits)
    assert Cost.of(packed) == Cost.of(full)


def test_a_weight_in_bfloat16_is_rounded_once():
    _, model, adapters = adapted("qwen2")
    model.to(torch.bfloat16)
    view = view_of(model, adapters)
    view.gather()
    for path, adapter in adapters.by_layer.items():
        exact = adapter.linear.weight.double() + 2.0 * adapter.up.double() @ adapter.down.double()
        ours = view.module.get_submodule(path).weight
        # Half a unit in the last of 8 bits, and the rounding of the float32 sum.
        assert ((ours - exact).abs() <= exact.abs() * 2.0**-8 + 1e-6).all()


def test_without_its_adapters_a_model_is_its_base_to_the_bit():
    base, model, adapters = adapted("qwen2")
    expected = base(IDS).logits
    with pytest.raises(KeyError), adapters.off():
        assert torch.equal(model(IDS).logits, expected)
        raise KeyError
    assert not torch.allclose(model(IDS).logits, expected, atol=0.1)


def test_the_start_is_the_model_itself_and_depends_on_the_seed_alone():
    base = build(tiny_config("qwen2"))
    torch.manual_seed(5)
    first = Adapters(same := deepcopy(base), LORA, seed=1)
    drawn = torch.rand(1)
    second, other = (Adapters(deepcopy(base), LORA, seed=seed) for seed in (1, 2))
    assert torch.equal(same(IDS).logits, base(IDS).logits)
    downs = [next(iter(a.by_layer.values())).down for a in (first, second, other)]
    assert torch.equal(downs[0], downs[1]) and not torch.equal(downs[0], downs[2])
    torch.manual_seed(5)
    assert torch.equal(torch.rand(1), drawn), "nobody else's random numbers are used up"


def test_the_head_and_what_is_not_linear_have_no_adapters():
    _, model, adapters = adapted("qwen2")
    assert {path.rpartition(".")[2] for path in adapters.by_layer} == {
        *("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    }
    assert {id(p) for p in model.parameters() if p.requires_grad} == {id(p) for p in adapters.parameters}
    _, _, some = adapted("qwen2", LoraConfig(rank=2, target_modules=["q_proj", "layers.1.mlp.up_proj"]))
    paths = ["model.layers.0.self_attn.q_proj", "model.layers.1.self_attn.q_proj", "model.layers.1.mlp.up_proj"]
    assert list(some.by_layer) == paths
    assert str(some) == "448 weights are trained, in adapters of rank 2 for 3 linear layers"


@pytest.mark.parametrize(("targets", "message"), [
    (["q_prj"], "lora.target_modules q_prj is not a layer of policy.model: did you mean q_proj?"),
    (["proj"], "lora.target_modules proj is not a layer of policy.model: did you mean v_proj?"),
    (["q_proj", "lm_head"], "lora.target_modules lm_head is the output head"),
    (["embed_tokens"], "lora.target_modules embed_tokens is not a linear layer of policy.model: known are down_proj"),
])  # fmt: skip
def test_layers_that_cannot_have_one_are_refused_from_the_configuration_alone(targets, message):
    with pytest.raises(UserError) as caught:
        check_lora(LoraConfig(rank=2, target_modules=targets), tiny_config("qwen2"))
    assert str(caught.value).startswith(message) and "\n" not in str(caught.value)


def test_models_whose_weights_are_used_otherwise_than_by_calling_linear_layers_are_refused(tmp_path):
    for architecture, why in (("gpt2", "its linear layers"), ("gemma3n_text", r"it reads weights .* itself \(")):
        build(tiny_config(architecture)).save_pretrained(tmp_path / architecture)
        with pytest.raises(UserError, match=f"lora.load_in_4bit does not fit policy.model: {why}"):
            load_model(PolicyConfig(model=str(tmp_path / architecture), dtype="float32"), four_bits=True)


def test_names_that_peft_would_take_for_experts_are_refused():
    config = tiny_config("qwen3_next")
    check_lora(LORA, config)
    with pytest.raises(UserError, match=r"peft would adapt .*experts"), pytest.warns(RuntimeWarning):
        check_lora(LoraConfig(rank=2, target_modules=["q_proj", "gate_proj", "up_proj", "down_proj"]), config)


def test_a_refreshed_reference_and_a_missing_peft_are_refused(tmp_path, monkeypatch):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "data.jsonl").write_text('{"prompt": "a"}\n')
    arguments = ["--policy.model", f"{tmp_path}", "--data.path", f"{tmp_path / 'data.jsonl'}", "--lora.rank=4"]
    arguments += ["--rewards", "[{function: exact_match}]", "--grpo.beta=0.1"]
    with pytest.raises(UserError, match=r"grpo.ref_every 2 refreshes .* without adapters"):
        check_train(parse(TrainConfig, [*arguments, "--grpo.ref_every=2"], "train").config, 1)
    config = parse(TrainConfig, arguments, "train").config
    check_train(config, 1)
    packed = parse(TrainConfig, [*arguments, "--lora.load_in_4bit=true"], "train").config
    assert packed.engine.stage(8) == 2 < config.engine.stage(8)
    monkeypatch.setattr("hybrid_grpo.config.checks.find_spec", lambda name: None if name == "bitsandbytes" else True)
    with pytest.raises(UserError, match=r"lora.load_in_4bit needs bitsandbytes, .* 'hybrid_grpo\[qlora\]'"):
        check_train(packed, 1)
    monkeypatch.setattr("hybrid_grpo.config.checks.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"lora.rank 4 needs peft, .* pip install 'hybrid_grpo\[lora\]'"):
        check_train(config, 1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_task(tmp_path_factory.mktemp("task"))


@pytest.fixture(scope="module")
def alone(folder):
    (seen,) = ranks(1, "adapted", folder / "stage3", programs="lora_programs.py")
    return seen


def assert_adapters_only(seen, world, folder, stage):
    weights = 4 * 3 * (128 + 128 + 2 * (128 + 64) + 128 + 128 + 3 * (128 + 256))
    assert seen["base"] and seen["moved"] and seen["reference"]
    # Two moments, and, with ZeRO, the float32 weights; padded.
    assert 2 * weights <= seen["optimizer"] <= 3.1 * weights
    out = folder / f"stage{stage}.{world}" / "exported"
    trained = load_file(out / "adapter" / "adapter_model.safetensors")
    assert sum(weight.numel() for weight in trained.values()) == weights
    assert all(weight.abs().max() > 0 for weight in trained.values())
    assert seen["checkpoint_bytes"] < 0.6 * (folder / "model" / "model.safetensors").stat().st_size
    for name, value in seen["metrics"][1].items():
        if not name.startswith(("time/", "throughput/", "memory/")):
            assert seen["resumed"][name] == pytest.approx(value, rel=1e-6, abs=1e-7), name


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [0, 3])
def test_alone_only_adapters_are_trained_with_the_gradient_of_peft(folder, alone, stage):
    seen = alone if stage == 3 else ranks(1, "adapted", folder / "stage0", programs="lora_programs.py")[0]
    assert_adapters_only(seen, 1, folder, stage)
    assert_same_steps([seen], alone)
    for ours, theirs in seen["gradient"].values():
        assert ours == pytest.approx(theirs, rel=1e-5)
    for metrics in seen["metrics"]:
        assert metrics["parity/logp_abs_diff_max"] < 1e-4
    assert seen["metrics"][0]["policy/kl"] == 0 < seen["metrics"][1]["policy/kl"]


@pytest.mark.ranks
@pytest.mark.parametrize("stage", [2, 3])
def test_two_ranks_are_one(folder, alone, stage):
    both = ranks(2, "adapted", folder / f"stage{stage}", programs="lora_programs.py")
    assert_same_steps(both, alone)
    for seen in both:
        assert seen["adapters"] == pytest.approx(alone["adapters"], rel=1e-4)
        assert_adapters_only(seen, 2, folder, stage)


@pytest.mark.ranks
def test_beside_a_base_in_four_bits_steps_are_those_beside_the_same_numbers_in_full(folder, tmp_path):
    plain = shutil.copytree(folder, tmp_path / "plain", ignore=shutil.ignore_patterns("stage*"))
    packed = load_model(PolicyConfig(model=str(folder / "model"), dtype="float32"), four_bits=True)
    in_full(packed).save_pretrained(plain / "model")
    (expected,) = ranks(1, "packed", plain, programs="lora_programs.py")
    both = ranks(2, "packed", folder, programs="lora_programs.py")
    assert_same_steps(both, expected)
    for seen in both:
        assert seen["adapters"] == pytest.approx(expected["adapters"], rel=1e-4)
        assert seen["bytes"] < 0.5 * expected["bytes"]
        assert seen["metrics"][0]["policy/kl"] == 0 < seen["metrics"][1]["policy/kl"]
        assert seen["metrics"][1]["parity/logp_abs_diff_max"] < 1e-4
    ours, theirs = (load_file(f / "exported" / "model.safetensors") for f in (folder, plain))
    for name, weight in theirs.items():
        torch.testing.assert_close(ours[name], weight, rtol=1e-4, atol=1e-5)


@pytest.mark.ranks
def test_the_exported_model_is_the_one_that_was_decoded_and_its_adapter_gives_the_same(folder, alone):
    out = folder / "stage3.1" / "exported"
    trained, start, base = (AutoModelForCausalLM.from_pretrained(f) for f in (out, *[folder / "model"] * 2))
    ids = torch.arange(1, 25).reshape(2, 12)
    with torch.no_grad():
        logits = PeftModel.from_pretrained(base, out / "adapter")(ids).logits
        torch.testing.assert_close(trained(ids).logits, logits, rtol=1e-4, atol=1e-4)
        assert not torch.allclose(start(ids).logits, logits, atol=0.1)


@pytest.mark.ranks
def test_the_supervised_stage_trains_adapters_too(folder):
    model = [f"--policy.model={folder}/model", "--policy.dtype=float32", "--policy.lr=0.01", "--lora.rank=2"]
    run = [f"--run.dir={folder}/runs", "--run.name=run", "--run.steps=2", "--log.wandb=disabled"]
    data = [f"--data.path={folder}/sft.jsonl", "--engine.zero_stage=0"]
    done = forks.run("-m", "hybrid_grpo", "sft", *model, *run, *data)
    assert done.status == 0, done.err
    assert "lora: 12,288 weights are trained, in adapters of rank 2 for 21 linear layers" in done.out
    out = folder / "runs" / "run" / "model"
    assert len(load_file(out / "adapter" / "adapter_model.safetensors")) == 42
    start, trained = (load_file(f / "model.safetensors") for f in (folder / "model", out))
    changed = {name for name in start if not torch.equal(start[name], trained[name])}
    assert len(changed) == 21 and all(name.endswith("_proj.weight") for name in changed)
