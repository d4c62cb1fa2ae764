"""Models in shards are what was saved, and all of them trains. See also tests/model/test_broken_checkpoints.py."""

import json
from pathlib import Path

import pytest
from char_tokenizer import char_tokenizer
from launching import ranks
from safetensors.torch import load_file, save_file
from tiny_models import build, tiny_config


@pytest.mark.ranks
def test_what_is_wrong_with_weights_in_shards_is_named(tmp_path: Path):
    """Into shards, transformers reads what fits, and ties what the files do not."""
    for name in ("intact", "more", "untied"):
        build(tiny_config("qwen2")).save_pretrained(tmp_path / name)
        char_tokenizer().save_pretrained(tmp_path / name)
    file = tmp_path / "more/model.safetensors"
    more = load_file(file)
    save_file(more | {"model.more": more["model.norm.weight"].clone()}, file, metadata={"format": "pt"})
    config = tmp_path / "untied/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"tie_word_embeddings": True}))
    for seen in ranks(2, "trust", tmp_path, programs="trust_programs.py"):
        for name, found in seen.items():
            assert not name.startswith("healthy ") or found == ""
            if name.startswith("cut "):
                assert found.startswith("model.embed_tokens.weight, ") and "layers.1" not in found
                assert "model.layers.0.mlp.up_proj.weight" in found
        assert seen["intact"].startswith("as in transformers' own model")
        assert "has 1 weights beside those that its config.json asks for, model.more among them" in seen["more"]
        assert "log-probabilities differ" in seen["untied"] or "config.json ties" in seen["untied"]
