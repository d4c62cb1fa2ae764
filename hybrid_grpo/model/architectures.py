"""Which architectures can be packed and decoded exactly, judged from a configuration before any weights are read.

Packed training and the paged decoder store the keys and values of attention layers, and derive masks from positions and
windows. An architecture that keeps other state, or whose attention needs more, is refused with the reason. What a
configuration does not show is read from the source code of the model's class. If it is not found there, the
architecture is refused too.
"""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from typing import Any, Literal

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.model.states import RECURRENCE_OF_LAYER, RECURRENCES, STATE_METHODS
from hybrid_grpo.model.towers import causal_lm, text_class

_TRANSFORMING_HEADS = (
    *("bert", "big_bird", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "modernbert-decoder"),
    *("rembert", "roberta", "roberta-prelayernorm", "roc_bert", "roformer", "xlm-roberta", "xlm-roberta-xl", "xmod"),
)
_DRAFTING = ("gemma4_assistant", "gemma4_unified_assistant")
_IN_ITS_MODULES = {
    "recurrent_gemma": "it carries a state from one prompt over to the next",
    "rwkv": "it divides weights in place to decode, and training has the same ones",
    # Training computes logits from the last hidden state, the head's weight, a scale and a soft cap: see LogitShape.
    **dict.fromkeys(_TRANSFORMING_HEADS, "its head transforms hidden states before it multiplies them by its weight"),
    **dict.fromkeys(("bert-generation", "cpmant", "xlnet"), "its attention looks ahead"),
    **dict.fromkeys(_DRAFTING, "it drafts for another model, whose keys and values it needs"),
    "dory": "transformers fails to decode several rows of it",
    "emu3": "transformers does not load it as a causal language model",
    "inkling_text": "it divides hidden states before its head, and leaves out the end of the vocabulary",
    **dict.fromkeys(("inkling2_text", "inkling2_loop_text"), "it leaves out the end of the vocabulary"),
    **dict.fromkeys(("llama4", "llama4_text"), "its class does not name its base model"),
    "moshi": "its window cuts the cache, but not a forward without one",
    "phimoe": "in training it draws its experts at random",
    "gemma3n": "its tower of images needs timm, with which nobody has proven it",
    "xlstm": "it caps its logits by a setting that other models do not have",
}
"""Model types that would be trained or decoded wrongly without an error, and why."""
_LOGIT_FIELDS = ("logit_scale", "logits_scaling", "lm_head_multiplier", "final_logit_softcapping")
"""What `LogitShape` reads from a configuration."""
_LAYER_KINDS = {"full_attention", "sliding_attention"}
_STATE_KINDS = {"linear_attention", "conv", "hybrid", "mamba"}
_NO_MIXER_KINDS = {"mlp", "moe"}
_ATTENTION_OPTIONS = {"attention_mask", "dropout", "position_ids", "s_aux", "scaling", "sliding_window", "softcap"}
"""Keywords of an attention call that `ATTENTION` honors or may ignore: masks are causal, dropout is off, and only
flash attention looks at positions."""
_CACHE_METHODS = {"update", "get_seq_length", "is_sliding"}
_STATE_CACHE_METHODS = {"get_conv_state", "get_recurrent_state", "is_recording_past", *STATE_METHODS}
_CACHE_NAMES = {"past_key_value", "past_key_values", "cache"}
_EXPANSION = "self.expand_kv"
"""The method that computes the keys and values of each token from what is cached for that token (DeepSeek-V2,
arXiv:2405.04434 section 2.1): its pages hold the result."""
_CROSS_ATTENTION_METHODS = {"cross_attention_cache", "is_updated", "layers", "self_attention_cache"}
"""Cache attributes of classes that can also attend to an encoder; models with an encoder are refused."""


def check_architecture(config: Any, decoder: Literal["paged", "transformers"], setting: str = "policy.model") -> None:
    """Raise UserError if a model, given its transformers configuration, cannot be decoded by `decoder`."""
    model = causal_lm(config)
    name = f"{setting} {config.name_or_path}: {model.__name__ if model else type(config).__name__}"
    if reason := undecodable(config):
        raise UserError(f"{name} cannot be trained here, {reason}: take another model")
    if decoder == "paged" and (reason := unsupported(config)):
        raise UserError(f"{name} cannot be decoded page by page, {reason}: set rollout.decoder: transformers")


def undecodable(config: Any) -> str | None:
    """Return why neither the decode loop nor the fallback can run an architecture; None if one of them can."""
    if causal_lm(config) is None:
        return "transformers has no causal language model of this kind"
    if config.is_encoder_decoder or getattr(config, "add_cross_attention", False):
        return "it attends to an encoder"
    text = config.get_text_config(decoder=True)
    # "vision" is fine: it means the tokens of images, and there are no images here.
    if getattr(text, "use_bidirectional_attention", None) in (True, "all") or not getattr(text, "is_causal", True):
        return "its attention looks ahead"
    head = inspect.getsource(causal_lm(config))
    for field in _LOGIT_FIELDS:
        if getattr(text, field, None) not in (None, 1.0) and field not in head:
            return f"its head ignores its {field}"
    return _IN_ITS_MODULES.get(config.model_type)


def unsupported(config: Any) -> str | None:
    """Return why the decode loop and packed training cannot run an architecture exactly; None if they can."""
    if reason := undecodable(config):
        return reason
    model, text = text_class(config), config.get_text_config(decoder=True)
    layers = getattr(text, "layer_types", None) or []
    source = _source(model)
    if odd := sorted(set(layers) - _LAYER_KINDS - _STATE_KINDS - _NO_MIXER_KINDS):
        return f"it has layers of kind {', '.join(odd)}"
    if layers and set(layers) <= _LAYER_KINDS:
        has_state = False
    else:
        has_state = any(f".{method}(" in source for method in STATE_METHODS)
        if model._is_stateful and not has_state:
            return "its layers keep a state beside keys and values"
    if has_state and (reason := _reason_in_states(source)):
        return reason
    # Classes with states do not claim it, whatever their attention does; their calls are looked at below.
    if not model._supports_attention_backend and not has_state:
        return "it does not route attention through transformers' attention interface"
    window = "sliding_attention" in layers or (not layers and getattr(text, "sliding_window", None))
    return _reason_in_source(source, bool(window), has_state)


def _reason_in_states(text: str) -> str | None:
    """Return why layers with a state cannot run packed rows: only the functions of `model.states` can be divided."""
    tree = ast.parse(text)
    for node in tree.body:
        if not isinstance(node, ast.ClassDef):
            continue
        calls = [call for call in ast.walk(node) if isinstance(call, ast.Call)]
        methods = {call.func.attr for call in calls if isinstance(call.func, ast.Attribute)} & set(STATE_METHODS)
        passed = {
            call.func.id
            for call in calls
            if isinstance(call.func, ast.Name) and any(w.arg is None for w in call.keywords)
        }
        if "update_conv_state" in methods and "causal_conv1d_fn" not in passed:
            return "its convolutions cannot be divided into sequences"
        called = {call.func.id for call in calls if isinstance(call.func, ast.Name)}
        of_layer = RECURRENCE_OF_LAYER in called and _layers_are_given_keywords(tree)
        if "update_recurrent_state" in methods and not (passed & RECURRENCES or of_layer):
            return "its recurrence cannot begin from a state"
    return None


def _layers_are_given_keywords(tree: ast.Module) -> bool:
    """Whether a model passes the keywords of its forward on to its layers."""
    loops = [node for node in ast.walk(tree) if isinstance(node, ast.For) and "self.layers" in ast.unparse(node.iter)]
    return any(
        isinstance(call, ast.Call)
        and ast.unparse(call.func) in ast.unparse(loop.target)
        and any(word.arg is None for word in call.keywords)
        for loop in loops
        for call in ast.walk(loop)
    )


def layer_configs(config: Any) -> list[Any]:
    """Return the configuration of each layer of the text model; Gemma 4 has settings that differ by layer."""
    text = config.get_text_config(decoder=True)
    return list(text.per_layer_config) if getattr(text, "is_heterogeneous", False) else [text] * text.num_hidden_layers


def cached_numbers(config: Any) -> int:
    """Return the numbers in one token's keys and values in all layers, as if each layer attended."""
    numbers = 0
    for layer in layer_configs(config):
        query_heads = getattr(layer, "num_attention_heads", 0)
        heads = getattr(layer, "num_key_value_heads", None) or query_heads
        numbers += 2 * heads * (getattr(layer, "head_dim", None) or layer.hidden_size // max(query_heads, 1))
    return numbers


def has_sinks(config: Any) -> bool:
    """Whether some layer's attention has sinks, one more logit for each query that takes weight from all others."""
    model = text_class(config)
    return model is not None and any("s_aux" in each.options for each in _attentions(ast.parse(_source(model))))


def _source(model: Any) -> str:
    return inspect.getsource(sys.modules[model.__module__])


def _attentions(tree: ast.Module) -> list[_Attention]:
    # Attention without a cache belongs to encoders of images or sound, which do not run on text.
    return [
        _Attention(node, call)
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and any(_is_result(each, ".update") for each in _assignments(node))
        for call in ast.walk(node)
        if isinstance(call, ast.Call) and ast.unparse(call.func) == "attention_interface"
    ]


@functools.cache  # a start asks several times
def _reason_in_source(text: str, has_windows: bool, has_state: bool) -> str | None:
    tree = ast.parse(text)
    nodes, attentions = list(ast.walk(tree)), _attentions(tree)
    options = {word for attention in attentions for word in attention.options}
    methods = {
        node.attr for node in nodes if isinstance(node, ast.Attribute) and ast.unparse(node.value) in _CACHE_NAMES
    }
    keeps_keywords = any(
        isinstance(node, ast.Call)
        and ast.unparse(node.func) == "self.self_attn"
        # The cache is among the keywords, and there is no **kwargs.
        and (words := {word.arg for word in node.keywords}) & _CACHE_NAMES
        and None not in words
        for node in nodes
    )
    if has_windows and "sliding_window" not in options:
        return "its attention has windows that only its masks know"
    if "self.is_decoder" in text:
        return "it is made for encoding"
    if not attentions and not has_state:
        return "its attention was not found in its source"
    if more := sorted(options - _ATTENTION_OPTIONS):
        return f"its attention needs {', '.join(more)}"
    if "cross_attention_cache" in methods:
        methods -= _CROSS_ATTENTION_METHODS
    if more := sorted(methods - _CACHE_METHODS - _STATE_CACHE_METHODS):
        return f"it has a cache of its own ({', '.join(more)})"
    if any(attention.mask not in ("attention_mask", "causal_mask") for attention in attentions):
        return "its attention makes a mask of its own"
    if not all(attention.is_over_the_cache for attention in attentions):
        return "it attends to keys and values other than those it caches"
    if keeps_keywords:
        return "its layers pass no keywords to their attention"
    return None


class _Attention:
    """A call of the attention interface, in a function that also updates a cache."""

    def __init__(self, function: ast.FunctionDef, call: ast.Call) -> None:
        arguments = [ast.unparse(argument) for argument in call.args]
        words = {word.arg: ast.unparse(word.value) for word in call.keywords if word.arg}
        self.options = words.keys()
        self.mask = words.get("attention_mask", arguments[4] if len(arguments) > 4 else "")
        before = [node for node in _assignments(function) if node.lineno < call.lineno]
        self.is_over_the_cache = all(_is_last_set_by_cache(name, before) for name in arguments[2:4])


def _assignments(function: ast.FunctionDef) -> list[ast.Assign]:
    nodes = (node for node in ast.walk(function) if isinstance(node, ast.Assign))
    return sorted(nodes, key=lambda node: node.lineno)


def _is_result(node: ast.Assign, method: str) -> bool:
    return isinstance(node.value, ast.Call) and ast.unparse(node.value.func).endswith(method)


def _is_last_set_by_cache(name: str, assignments: list[ast.Assign]) -> bool:
    # The target of an assignment is `key`, or `key, value`.
    setting = [node for node in assignments if name in ast.unparse(node.targets[0]).strip("()").split(", ")]
    return bool(setting) and (_is_result(setting[-1], ".update") or _is_result(setting[-1], _EXPANSION))
