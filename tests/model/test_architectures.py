import pytest
from tiny_models import ARCHITECTURES, MORE_ATTENTION, STATEFUL, tiny_config
from transformers import AutoConfig

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.architectures import check_architecture, has_sinks, undecodable, unsupported


@pytest.mark.parametrize("architecture", ARCHITECTURES + MORE_ATTENTION)
def test_what_the_decode_loop_is_tested_with_is_supported(architecture):
    config = tiny_config(architecture)
    assert unsupported(config) is None
    check_architecture(config, "paged")
    check_architecture(config, "transformers")


@pytest.mark.parametrize("architecture", STATEFUL)
def test_layers_with_a_state_are_for_generate(architecture):
    config = tiny_config(architecture)
    assert "cannot begin from a state" in unsupported(config)
    assert undecodable(config) is None
    check_architecture(config, "transformers")


@pytest.mark.parametrize("architecture, reason", [
    ("minimax", "a cache of its own"),
    ("zamba", "convolutions cannot be divided"),
    ("deepseek_v4", "compressed_sparse_attention"),
    ("llama4_text", "does not name its base model"),
    # Keys repeated, or values split, behind the cache.
    ("jetmoe", "keys and values other than those it caches"),
    ("diffllama", "keys and values other than those it caches"),
    # An indexer chooses which keys are attended to.
    ("deepseek_v32", "indexed_attention"),
    ("doge", "a mask of its own"),
    # Layers that do not hand keyword arguments on.
    ("nemotron", "no keywords"),
    # Position in the mask (ALiBi), or attention of an older style.
    ("bloom", "attention interface"),
    ("mpt", "attention interface"),
    ("falcon", "attention interface"),
    ("bart", "attends to an encoder"),
    ("t5", "no causal language model"),
    ("vit", "no causal language model"),
])  # fmt: skip
def test_what_would_be_decoded_wrongly_is_refused_with_the_reason(architecture, reason):
    assert reason in unsupported(AutoConfig.for_model(architecture))


@pytest.mark.parametrize("architecture, harmless, harmful, reason", [
    # Their attention is not told of the window: only the mask has it, and the loop makes its own.
    ("qwen2_moe", {}, {"use_sliding_window": True, "max_window_layers": 99}, "windows that only its masks know"),
    # The whole model of text and images leaves out what its text model has.
    ("gemma3", {}, {"text_config": {"final_logit_softcapping": 30.0}}, "head ignores its final_logit_softcapping"),
    ("gemma3_text", {}, {"use_bidirectional_attention": True}, "looks ahead"),
    ("llama", {}, {"is_causal": False}, "looks ahead"),
    ("gpt2", {}, {"add_cross_attention": True}, "attends to an encoder"),
    ("qwen3", {}, {"layer_types": ["full_attention", "chunked_attention"] * 16}, "chunked_attention"),
])  # fmt: skip
def test_an_architecture_is_refused_for_what_a_configuration_makes_of_it(architecture, harmless, harmful, reason):
    assert unsupported(AutoConfig.for_model(architecture, **harmless)) is None
    assert reason in unsupported(AutoConfig.for_model(architecture, **harmful))


def test_sinks_are_found_in_the_source():
    assert has_sinks(tiny_config("gpt_oss")) and has_sinks(tiny_config("mimo_v2_flash"))
    assert not has_sinks(tiny_config("qwen3")) and not has_sinks(AutoConfig.for_model("vit"))


def test_the_way_out_is_named():
    config = tiny_config("mamba")
    config.name_or_path = "some/mamba"
    with pytest.raises(UserError) as error:
        check_architecture(config, "paged")
    message = str(error.value)
    assert message.startswith("policy.model some/mamba: MambaForCausalLM") and "\n" not in message
    assert "cannot begin from a state" in message and message.endswith("set rollout.decoder: transformers")


@pytest.mark.parametrize("decoder", ["paged", "transformers"])
@pytest.mark.parametrize("architecture, reason", [
    ("t5", "no causal language model"),
    ("bart", "attends to an encoder"),
    ("rwkv", "divides weights in place"),
    ("recurrent_gemma", "carries a state"),
    ("bert-generation", "looks ahead"),
    ("cpmant", "looks ahead"),
    ("dory", "fails to decode several rows"),
    ("moshi", "window cuts the cache"),
    ("phimoe", "draws its experts at random"),
    # What training would compute of their last hidden states are not their logits.
    ("modernbert-decoder", "head transforms"),
    ("roberta", "head transforms"),
    ("xlstm", "caps its logits"),
])  # fmt: skip
def test_what_neither_can_decode_is_refused_for_both(architecture, reason, decoder):
    with pytest.raises(UserError, match=f"{reason}.*: take another model$"):
        check_architecture(AutoConfig.for_model(architecture), decoder)
