import json
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_models import ARCHITECTURES, STATEFUL, build, tiny_config
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.sources import Source, read_rows
from hybrid_grpo.model import hub, loading
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.limits import check_lengths
from hybrid_grpo.model.loading import load_model, training_attention, without_dropout


def test_dropout_is_off_in_the_text_model_of_one_that_takes_images_too(tmp_path):
    """Its settings stand in a section of their own, which used to keep its dropout."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {"vocab_size": 61, "head_dim": 8, "num_key_value_heads": 2, "attention_dropout": 0.9, "pad_token_id": 0}
    images = {"image_size": 8, "patch_size": 4}
    config = Gemma3Config(text_config={**sizes, **text}, vision_config={**sizes, **images}, mm_tokens_per_image=1)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)

    model = load_model(PolicyConfig(model=str(tmp_path), dtype="float32", attn_implementation="eager")).train()
    assert model.config.get_text_config().attention_dropout == 0.0
    text = config.text_config.to_dict()
    assert without_dropout(config).text_config.to_dict() == {**text, "attention_dropout": 0.0}, "nothing else changes"
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model.eval()(ids).logits)


FP4 = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
"""The magnitudes of four bits, by the lower three; the upper one is the sign."""


def in_mxfp4(folder):
    """A tiny gpt-oss whose experts are in four bits, as in the released files; and what their numbers are."""
    model = build(tiny_config("gpt_oss")).to(torch.bfloat16)
    model.save_pretrained(folder)
    weights, expected = load_file(folder / "model.safetensors"), {}
    generator = torch.Generator().manual_seed(0)
    for name in [name for name in weights if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inner, outer = weights.pop(name).shape
        codes = torch.randint(16, (experts, outer, inner // 32, 32), generator=generator)
        exponents = torch.randint(124, 128, (experts, outer, inner // 32), generator=generator)
        weights[f"{name}_blocks"] = (codes[..., ::2] + 16 * codes[..., 1::2]).to(torch.uint8)
        weights[f"{name}_scales"] = exponents.to(torch.uint8)
        numbers = FP4[codes % 8] * (1 - 2 * (codes // 8)) * 2.0 ** (exponents - 127)[..., None]
        expected[name] = numbers.flatten(2).transpose(1, 2)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(config))
    return expected


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_experts_in_four_bits_are_trained_and_exported_whole(tmp_path, dtype):
    expected, policy = in_mxfp4(tmp_path), PolicyConfig(model=str(tmp_path), dtype=dtype)
    check_files(policy.model, loading.load_config(policy.model))
    said = f"in four bits in the files (MXFP4); loaded, trained and exported in {dtype}"
    assert loading.weights_fact(policy) == {"weights": said}
    model = load_model(policy)
    for name, numbers in expected.items():
        parameter = model.get_parameter(name)
        assert parameter.dtype == getattr(torch, dtype) and parameter.requires_grad
        assert torch.equal(parameter.float(), numbers)
    assert not hasattr(loading.dequantized(loading.load_config(policy.model)), "quantization_config")
    model.save_pretrained(tmp_path / "exported")
    again = PolicyConfig(model=str(tmp_path / "exported"), dtype=dtype)
    assert loading.weights_fact(again) == {}
    assert all(map(torch.equal, load_model(again).parameters(), model.parameters()))


def test_a_sequence_must_not_change_how_the_others_are_rotated():
    """Phi-4-mini: past 4,096 positions all tokens of a forward are rotated as those of a long sequence."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    check_lengths(config, 64)
    with pytest.raises(
        UserError, match=r"^policy.model has 64 positions before its rotary.* is 65 tokens: limit .* to 64$"
    ):
        check_lengths(config, 65)


def test_sequences_end_before_attention_becomes_sparse():
    """DeepSeek-V3.2 decodes with other keys than it trains with once its indexer has to choose."""
    config = AutoConfig.for_model("deepseek_v32", index_topk=64)
    check_lengths(config, 64)
    with pytest.raises(UserError, match=r"has 64 positions before its attention selects.* to 64$"):
        check_lengths(config, 65)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_decode_loop_runs_is_trained_packed(architecture, tmp_path):
    tiny_config(architecture).save_pretrained(tmp_path)
    for setting, expected in {"auto": ATTENTION, "packed": ATTENTION, "eager": "eager"}.items():
        policy = PolicyConfig(model=str(tmp_path), attn_implementation=setting)
        assert training_attention(policy) == expected


UNPACKED = {name: "sdpa" for name in ("zamba", "jetmoe")}
UNPACKED |= {name: "eager" for name in ("mamba", "bloom", "mpt")}


@pytest.mark.parametrize("architecture", UNPACKED)
def test_other_models_are_trained_by_transformers_attention_and_not_packed(architecture, tmp_path):
    config = tiny_config(architecture) if architecture in STATEFUL else AutoConfig.for_model(architecture)
    config.save_pretrained(tmp_path)
    assert training_attention(PolicyConfig(model=str(tmp_path))) == UNPACKED[architecture]
    for setting, value in (("attn_implementation", "packed"), ("shared_prefix", "on")):
        with pytest.raises(UserError, match=rf"^policy\.{setting} {value} does not fit [^\n]*: set it to auto$"):
            training_attention(PolicyConfig(model=str(tmp_path), **{setting: value}))


def test_the_padding_of_a_shard_is_no_weight(monkeypatch):
    """It is memory that nobody has written: a model on three ranks was refused for NaN in it, now and then."""
    monkeypatch.setattr(loading, "rank", lambda: 2)
    model = torch.nn.Linear(2, 5, bias=False)
    model.weight.ds_tensor = torch.tensor([1.0, 2.0, float("nan"), float("inf")])
    model.weight.ds_numel = 10
    loading._refuse_broken_weights(model, "policy.model here")
    model.weight.ds_tensor[1] = float("nan")
    with pytest.raises(UserError, match="1 of its weights hold NaN or infinity, weight among them"):
        loading._refuse_broken_weights(model, "policy.model here")


@pytest.mark.parametrize("name", ["./nothere", "/nothere", "runs/of/mine/model"])
def test_a_path_that_is_not_there_is_refused_without_asking_the_hub(name, monkeypatch):
    """The hub had been asked for half a minute, in twelve lines."""
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    monkeypatch.setattr(loading.AutoTokenizer, "from_pretrained", lambda *_, **__: pytest.fail("asked"))
    for load in (loading.load_config, loading.load_tokenizer):
        with pytest.raises(UserError, match=f"policy.model {name}: there is no such folder"):
            load(name)


def test_a_hub_name_whose_owner_is_a_folder_here_is_no_path(tmp_path, monkeypatch):
    (tmp_path / "Qwen").mkdir()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(hub, "silence", lambda: "")
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda name, **_: f"asked for {name}")
    assert loading.load_config("Qwen/Qwen3-0.6B") == "asked for Qwen/Qwen3-0.6B"


def test_a_plan_needs_no_weights(tmp_path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    check_files(str(tmp_path), config, needed=False)
    with pytest.raises(UserError, match="has no weights"):
        check_files(str(tmp_path), config)


@pytest.fixture
def answering(monkeypatch):
    """Sets what the hub does when it is asked; returns what it was asked."""
    asked = []

    def set_answer(error):
        def head(*arguments, **_):
            asked.append(arguments)
            if error is not None:
                raise error

        monkeypatch.setattr(hub, "get_session", lambda: SimpleNamespace(head=head))
        return asked

    for module in ("huggingface_hub.constants", "datasets.config"):
        monkeypatch.setattr(f"{module}.HF_HUB_OFFLINE", False)
    hub.silence.cache_clear()
    yield set_answer
    hub.silence.cache_clear()


def test_a_hub_that_does_not_answer_is_asked_once(answering, monkeypatch, capfd):
    """It had been asked for half a minute, in twelve lines, for a model, and again for a data set."""
    asked = answering(ConnectionError("Name or service not known"))
    monkeypatch.setattr("time.sleep", lambda _: pytest.fail("waited"))
    silent = r"and the hub does not answer \(https://.*\): check the network or HF_ENDPOINT, or give a local f"
    for load in (loading.load_config, loading.load_tokenizer):
        with pytest.raises(UserError, match=rf"^policy.model Qwen/Nothing.*: there is no such folder.* {silent}"):
            load("Qwen/Nothing")
    with pytest.raises(UserError, match=rf"^data.path some/rows: there is no such file .* {silent}"):
        read_rows(Source("some/rows"))
    assert len(asked) == 1 and capfd.readouterr().err == ""


def test_a_hub_that_must_not_be_asked_is_not(answering, monkeypatch):
    asked = answering(None)
    monkeypatch.setattr(hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr("datasets.config.HF_HUB_OFFLINE", True)
    says = "and HF_HUB_OFFLINE is set: unset it, or give a local f"
    with pytest.raises(UserError, match=f"^policy.model some/model.* {says}"):
        loading.load_config("some/model")
    with pytest.raises(UserError, match=f"^data.path some/rows.* {says}"):
        read_rows(Source("some/rows", subset="main"))
    assert not asked


def test_a_hub_that_answers_is_not_left(answering):
    class ReadTimeout(Exception):
        pass

    for error in (None, ReadTimeout()):
        hub.silence.cache_clear()
        answering(error)
        assert hub.silence() == "" and not hub.constants.is_offline_mode()


@pytest.mark.parametrize("architecture", ["qwen2", "llama", "gpt2"])
def test_a_folder_without_a_tokenizer_is_told_so_in_one_line(architecture, tmp_path):
    tiny_config(architecture).save_pretrained(tmp_path)
    with pytest.raises(UserError, match=r"has no tokenizer: save the model's tokenizer in the same folder \(.*\)$"):
        loading.load_tokenizer(str(tmp_path))
