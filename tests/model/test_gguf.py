"""A model of one quantized file in place of a folder."""

import gguf
import numpy
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.fingerprints import of_model
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.limits import stop_ids
from hybrid_grpo.model.loading import load_config, load_model, load_tokenizer, weights_fact

SHAPES = {
    **{f"blk.0.{name}": (32, 32) for name in ("attn_q.weight", "attn_output.weight")},
    **{f"blk.0.{name}": (16, 32) for name in ("attn_k.weight", "attn_v.weight")},
    **{f"blk.0.{name}": (64, 32) for name in ("ffn_gate.weight", "ffn_up.weight")},
    **{"blk.0.ffn_down.weight": (32, 64), "token_embd.weight": (33, 32)},
    **{name: (32,) for name in ("blk.0.attn_norm.weight", "blk.0.ffn_norm.weight", "output_norm.weight")},
}


def write(path):
    """Write a Llama of one layer in eight bits; return what its numbers mean, by their names in the file."""
    random, file, meant = numpy.random.default_rng(0), gguf.GGUFWriter(path, "llama"), {}
    sizes = {"context_length": 64, "embedding_length": 32, "feed_forward_length": 64, "block_count": 1}
    for name, value in {**sizes, "attention.head_count": 4, "attention.head_count_kv": 2}.items():
        file.add_uint32(f"llama.{name}", value)
    file.add_layer_norm_rms_eps(1e-5)
    file.add_tokenizer_model("gpt2")
    file.add_token_list(["<|im_start|>", "<|im_end|>", *map(chr, range(65, 95)), "AB"])
    file.add_token_types([3, 3] + [1] * 31)
    file.add_token_merges(["A B"])
    file.add_eos_token_id(1)
    for name, shape in SHAPES.items():
        value = random.normal(size=shape).astype("float32")
        if len(shape) == 2:
            stored = gguf.quants.quantize(value, Kind.Q8_0)
            file.add_tensor(name, stored, raw_dtype=Kind.Q8_0)
            value = gguf.quants.dequantize(stored, Kind.Q8_0)
        else:
            file.add_tensor(name, value)
        meant[name] = torch.from_numpy(value)
    for write in (file.write_header_to_file, file.write_kv_data_to_file, file.write_tensors_to_file, file.close):
        write()
    return meant


def test_a_quantized_file_is_a_model_and_is_dequantized_once(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path / "cache"))
    for of, value in (("_is_torch_distributed_initialized", True), ("_get_torch_distributed_rank", 1)):
        monkeypatch.setattr(f"transformers.distributed.mixin.{of}", lambda value=value: value)
    meant, name = write(tmp_path / "tiny.gguf"), str(tmp_path / "tiny.gguf")
    policy, config, tokenizer = PolicyConfig(model=name, dtype="float32"), load_config(name), load_tokenizer(name)
    check_files(name, config)
    assert tokenizer("ABBA")["input_ids"] == [32, 3, 2]
    assert stop_ids(name, tokenizer, [], config) == (1,)
    weights = load_model(policy).state_dict()
    for ours, theirs in (("embed_tokens", "token_embd"), ("layers.0.mlp.down_proj", "blk.0.ffn_down")):
        assert torch.equal(weights[f"model.{ours}.weight"], meant[f"{theirs}.weight"])
    # llama.cpp pairs the channels that rotate differently: of eight, 0 with 1, and transformers 0 with 4.
    query = meant["blk.0.attn_q.weight"].view(4, 4, 2, 32).transpose(1, 2).reshape(32, 32)
    assert torch.equal(weights["model.layers.0.self_attn.q_proj.weight"], query)
    (folder,) = (path for path in (tmp_path / "cache").iterdir() if path.is_dir())
    assert weights_fact(policy)["weights"] == f"dequantized from tiny.gguf, once, into {folder}"
    assert of_model(files_of(name)).keys() == {"weights", "configuration", "tokenizer"}
    write(tmp_path / "other.gguf")
    assert files_of(str(tmp_path / "other.gguf")) != str(folder)


def test_what_is_no_quantized_file_is_refused(tmp_path, monkeypatch):
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path))
    (tmp_path / "cut.gguf").write_bytes(b"GGUF" + bytes(99))
    for name, why in (("cut", "cannot be read: "), ("none", "there is no such file: check the path")):
        with pytest.raises(UserError, match=rf"^policy.model {tmp_path}/{name}.gguf:? {why}"):
            load_tokenizer(str(tmp_path / f"{name}.gguf"))
    monkeypatch.setattr("hybrid_grpo.model.gguf.find_spec", lambda _: None)
    with pytest.raises(UserError, match=r"cut.gguf needs gguf: pip install 'hybrid_grpo\[gguf\]'$"):
        load_config(str(tmp_path / "cut.gguf"))
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]
    monkeypatch.undo()
    monkeypatch.setenv("HYBRID_GRPO_CACHE", str(tmp_path / "cut.gguf"))
    with pytest.raises(UserError, match=r"cut.gguf: .*: make room, or name another folder in HYBRID_GRPO_CACHE$"):
        files_of(str(tmp_path / "cut.gguf"))
