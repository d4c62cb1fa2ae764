import pytest
import torch
from tiny_models import ARCHITECTURES, STATEFUL, tiny_config
from transformers import AutoConfig, Gemma3Config, Gemma3ForConditionalGeneration

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model import loading
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.loading import check_lengths, load_model, training_attention


def test_dropout_is_off_in_the_text_model_of_one_that_takes_images_too(tmp_path):
    """Its settings stand in a section of their own, which used to keep its dropout."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4}
    text = {"vocab_size": 61, "head_dim": 8, "num_key_value_heads": 2, "attention_dropout": 0.9, "pad_token_id": 0}
    images = {"image_size": 8, "patch_size": 4}
    config = Gemma3Config(text_config={**sizes, **text}, vision_config={**sizes, **images}, mm_tokens_per_image=1)
    Gemma3ForConditionalGeneration(config).save_pretrained(tmp_path)

    model = load_model(PolicyConfig(model=str(tmp_path), dtype="float32", attn_implementation="eager")).train()
    assert model.config.get_text_config().attention_dropout == 0.0
    ids = torch.arange(1, 20)[None]
    with torch.no_grad():
        assert torch.equal(model(ids).logits, model.eval()(ids).logits)


def test_a_sequence_must_not_change_how_the_others_are_rotated():
    """Phi-4-mini: past 4,096 positions all tokens of a forward are rotated as those of a long sequence."""
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    config = tiny_config("phi3", rope_parameters=rope, original_max_position_embeddings=64)
    check_lengths(config, 64)
    with pytest.raises(UserError, match=r"is 65 tokens and policy.model has 64 positions before its rotary.*by 1$"):
        check_lengths(config, 65)


def test_sequences_end_before_attention_becomes_sparse():
    """DeepSeek-V3.2 decodes with other keys than it trains with once its indexer has to choose."""
    config = AutoConfig.for_model("deepseek_v32", index_topk=64)
    check_lengths(config, 64)
    with pytest.raises(UserError, match=r"has 64 positions before its attention selects.*by 1$"):
        check_lengths(config, 65)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_what_the_decode_loop_runs_is_trained_packed(architecture, tmp_path):
    tiny_config(architecture).save_pretrained(tmp_path)
    for setting, expected in {"auto": ATTENTION, "packed": ATTENTION, "eager": "eager"}.items():
        policy = PolicyConfig(model=str(tmp_path), attn_implementation=setting)
        assert training_attention(policy) == expected


UNPACKED = {name: "sdpa" for name in ("jamba", "falcon_h1", "qwen3_next", "bamba", "deepseek_v3")}
UNPACKED |= {name: "eager" for name in ("mamba", "bloom", "gpt_oss", "mpt")}


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
    monkeypatch.setattr(loading.AutoConfig, "from_pretrained", lambda name, **_: f"asked for {name}")
    assert loading.load_config("Qwen/Qwen3-0.6B") == "asked for Qwen/Qwen3-0.6B"


def test_a_plan_needs_no_weights(tmp_path):
    config = tiny_config("llama")
    config.save_pretrained(tmp_path)
    check_files(str(tmp_path), config, needed=False)
    with pytest.raises(UserError, match="has no weights"):
        check_files(str(tmp_path), config)
