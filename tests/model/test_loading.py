import torch
from transformers import Gemma3Config, Gemma3ForConditionalGeneration

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.model.loading import load_model


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
