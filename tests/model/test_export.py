import json

from tiny_models import tiny_config
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from hybrid_grpo.model.export import save_tokenizer
from hybrid_grpo.model.loading import load_tokenizer


def test_an_exported_tokenizer_has_the_files_it_was_loaded_from(tmp_path):
    """transformers loads a WordLevel tokenizer as BPE where a Qwen2 model lies beside it, and would save that."""
    backend = Tokenizer(models.WordLevel({"a": 0, "b": 1, "<unk>": 2, "<eos>": 3}, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    made = PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>", eos_token="<eos>")
    made.chat_template = "{{ messages[0]['content'] }}"
    made.save_pretrained(tmp_path / "model")
    tiny_config("qwen2").save_pretrained(tmp_path / "model")
    loaded = load_tokenizer(str(tmp_path / "model"))
    assert json.loads(loaded.backend_tokenizer.to_str())["model"]["type"] == "BPE"
    save_tokenizer(loaded, tmp_path / "out")
    for path in (tmp_path / "out").iterdir():
        assert path.read_bytes() == (tmp_path / "model" / path.name).read_bytes(), path.name
    assert {"tokenizer.json", "tokenizer_config.json"} <= {path.name for path in (tmp_path / "out").iterdir()}
    # One that came from nowhere is saved as it is.
    save_tokenizer(made, tmp_path / "new")
    assert json.loads((tmp_path / "new" / "tokenizer.json").read_text())["model"]["type"] == "WordLevel"
