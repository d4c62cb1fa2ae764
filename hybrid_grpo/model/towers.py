"""The two parts of checkpoints that take pictures: the text model, and the tower.

The class of such a checkpoint joins a tower, which turns pictures into embeddings, with a text model, which reads these
among the embeddings of tokens. Here the text model and the output head are built alone, under the names that they have
in the whole model. So weights load by transformers' own renaming, and trained weights and adapters fit the whole model.
The tower is built alone too, where prompts have pictures (`sight.py`), and is not trained: an export copies it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from copy import deepcopy
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    MODEL_MAPPING,
    AutoModelForCausalLM,
    PreTrainedModel,
)
from transformers.integrations import deepspeed as integration

if TYPE_CHECKING:
    from hybrid_grpo.model.sight import ImageInputs

TOWERED = (
    *("aria", "cosmos3_omni", "deepseek_vl", "deepseek_vl_hybrid", "fuyu", "gemma3", "gemma4", "gemma4_unified"),
    *("glm46v", "glm4v", "glm4v_moe", "glm_ocr", "got_ocr2", "hyperclovax_vision_v2", "idefics2", "idefics3"),
    *("internvl", "janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "lighton_ocr", "llava", "llava_next"),
    *("llava_next_video", "llava_onevision", "minicpm_ocr", "minicpmv4_6", "minicpmv4_7", "minimax_m3_vl"),
    *("mistral3", "mistral_large4", "ovis2", "pp_chart2table", "qianfan_ocr", "qwen2_5_vl", "qwen2_vl", "qwen3_5"),
    *("qwen3_5_moe", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "video_llama_3", "video_llava", "vipllava"),
)
"""Model types of whole checkpoints whose text is trained without their towers."""


@contextmanager
def outside_deepspeed() -> Iterator[None]:
    """A context in which transformers does not shard what it builds."""
    outer = integration._hf_deepspeed_config_weak_ref
    integration.unset_hf_deepspeed_config()
    try:
        yield
    finally:
        integration._hf_deepspeed_config_weak_ref = outer


def has_tower(config: Any) -> bool:
    """Whether a configuration is of a checkpoint whose text model is built without towers. Checkpoints of the same type
    may hold the text model alone, and then name its class."""
    if config.model_type not in TOWERED:
        return False
    named = (config.architectures or [""])[0]
    return not named.endswith("ForCausalLM") or named == MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING[type(config)].__name__


def causal_lm(config: Any) -> Any:
    """Return transformers' class of a causal language model, with its towers; None if it has none."""
    mapping = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if has_tower(config) else MODEL_FOR_CAUSAL_LM_MAPPING
    return mapping.get(type(config), None)


def text_class(config: Any) -> Any:
    """Return the class whose layers compute the text: the text model's if there are towers, else `causal_lm`."""
    return MODEL_MAPPING[type(config.get_text_config(decoder=True))] if has_tower(config) else causal_lm(config)


def loader(config: Any) -> Any:
    """Return the class with `from_pretrained` and `from_config` that makes the causal language model, without towers:
    one of transformers' AutoModel classes, or the checkpoint's own, changed."""
    return _without_towers(config) if has_tower(config) else AutoModelForCausalLM


def lacks_towers(model: Any) -> bool:
    """Whether a model was built without its towers."""
    return bool(getattr(model, "kept", None))


def text_of(model: Any) -> Any:
    """Return the module of a causal language model that turns tokens into hidden states."""
    base = model.base_model
    return getattr(base, model.kept) if lacks_towers(model) else base


def text_forward(model: Any, input_ids: Tensor, position_ids: Tensor, shown: ImageInputs | None, **more: Any) -> Any:
    """Return the output of a causal language model's base for tokens, int64 [b, S]; those below 0 are pictures.

    `position_ids` is int64, [b, S] or [axes, b, S]; `more` are further arguments of the base. Of a model that was
    built without its towers, the text model is called, with pictures or without: under ZeRO-3 ranks gather weights in
    the order in which modules are called, and some ranks may have no picture.
    """
    if not lacks_towers(model):
        return model.base_model(input_ids=input_ids, position_ids=position_ids, **more)
    text, (pad, unread) = text_of(model), _unread(model.config)
    unread_bS = input_ids < 0
    for token in unread:
        unread_bS = unread_bS | (input_ids == token)
    ids_bS = input_ids.masked_fill(unread_bS, pad)
    tokens_bSD = embeds_bSD = text.get_input_embeddings()(ids_bS)
    if shown is not None:
        embeds_bSD, deep = shown.embedded(tokens_bSD)
        if deep:
            more |= {"visual_pos_masks": input_ids < 0, "deepstack_visual_embeds": deep}
    if getattr(text, "hidden_size_per_layer_input", 0):
        more["per_layer_inputs"] = text.get_per_layer_inputs(ids_bS, tokens_bSD)
    return text(inputs_embeds=embeds_bSD, position_ids=position_ids, **more)


def _unread(config: Any) -> tuple[int, list[int]]:
    """Return the token in the places of pictures where embeddings of tokens are looked up, and the tokens that the
    model itself replaces by it, should it sample them."""
    kinds = ("image", "video", "audio") if config.model_type.startswith("gemma4") else ()
    pad = getattr(config.get_text_config(decoder=True), "pad_token_id", None) or 0
    return pad, [token for kind in kinds if (token := getattr(config, f"{kind}_token_id", None)) is not None]


def tower_class(config: Any) -> Any:
    """Return the class of a whole checkpoint, changed so that it has the towers and neither text model nor head."""
    whole, kept, _ = _whole(config)

    def init(self: Any, config: Any) -> None:
        type(whole).__init__(self, config)
        setattr(self.base_model, kept, None)
        self.lm_head, self.all_tied_weights_keys = None, {}

    ignored = [*(whole._keys_to_ignore_on_load_unexpected or []), rf"(^|\.)({kept}|lm_head)(\.|$)"]
    return _subclass(type(whole), __init__=init, _keys_to_ignore_on_load_unexpected=ignored)


def tower_parameters(config: Any) -> int:
    """Return the number of parameters that a checkpoint has besides its text model and head."""
    with torch.device("meta"):
        return sum(parameter.numel() for parameter in tower_class(config)(deepcopy(config)).parameters())


def _whole(config: Any) -> tuple[Any, str, Any]:
    """Return a whole model without memory, the name of its text model in its base model, and the text model's class."""
    with outside_deepspeed(), torch.device("meta"):
        whole = causal_lm(config)(deepcopy(config))
    text = text_class(config)
    [kept] = [name for name, child in whole.base_model.named_children() if type(child) is text]
    return whole, kept, text


def _without_towers(config: Any) -> Any:
    whole, kept, text = _whole(config)
    base, head = whole.base_model, whole.get_output_embeddings()
    towers = tuple(name for name in (*base._modules, *base._parameters) if name != kept)

    def init_base(self: Any, config: Any) -> None:
        _initialize_like(self, config, base)
        setattr(self, kept, text._from_config(config.get_text_config(decoder=True)))
        self.post_init()

    # Weights that are missing are refused, and some classes would initialize parts of their towers.
    without_start = {"_init_weights": lambda self, module: None}
    kept_base = _subclass(type(base), __init__=init_base, **without_start)

    def init(self: Any, config: Any) -> None:
        _initialize_like(self, config, whole)
        setattr(self, whole.base_model_prefix, kept_base(config))
        self.lm_head = nn.Linear(head.in_features, head.out_features, head.bias is not None)
        self.post_init()

    def get_parameter(self: Any, name: str) -> Any:
        # transformers transposes experts whose shape in the files is another; under ZeRO-3 the parameter is empty.
        parameter = nn.Module.get_parameter(self, name)
        return torch.empty(parameter.ds_shape, device="meta") if hasattr(parameter, "ds_shape") else parameter

    def tie_weights(self: Any, *args: Any, **options: Any) -> None:
        # It makes parameters of what it gets.
        self.get_parameter = partial(nn.Module.get_parameter, self)
        type(whole).tie_weights(self, *args, **options)
        del self.get_parameter

    def from_config(cls: Any, config: Any, trust_remote_code: bool = False, **options: Any) -> Any:
        return cls._from_config(config, **options)

    ignored = [*(whole._keys_to_ignore_on_load_unexpected or []), *(rf"(^|\.){re.escape(t)}(\.|$)" for t in towers)]
    return _subclass(
        type(whole), __init__=init, **without_start, get_parameter=get_parameter, tie_weights=tie_weights,
        from_config=classmethod(from_config), kept=kept, _keys_to_ignore_on_load_unexpected=ignored,
    )  # fmt: skip


def _initialize_like(module: Any, config: Any, like: Any) -> None:
    """Initialize a module with the plain attributes of another, and None in the place of its parts."""
    PreTrainedModel.__init__(module, config)
    for name, value in vars(like).items():
        if not hasattr(module, name):
            setattr(module, name, value)
    for name in (*like._modules, *like._parameters):
        setattr(module, name, None)


def _subclass(kind: Any, **members: Any) -> Any:
    """Return a subclass under the name of its parent, by which transformers finds the renaming of weights."""
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def whole_layers(model: Any) -> list[nn.Module]:
    """Return the layers of a causal language model whose weights ZeRO-3 is to gather together, reducing their gradients
    together when the layer's backward pass has ended. By default it does so for each module of a layer, which takes
    Python longer than a GPU takes to compute a small one.

    These are the first layer that trains and those after it. From now on their inputs have gradients in training.
    """
    layers = list(getattr(text_of(model), "layers", ()))
    while layers and not any(p.requires_grad for p in layers[0].parameters()):
        del layers[0]
    for layer in layers:
        layer.register_forward_pre_hook(_with_gradient)
    return layers


def _with_gradient(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Let the input of a layer have a gradient, although what is before it does not train or is cut off: DeepSpeed
    reduces the gradients of a whole layer when that of its input is known, which without one is too early."""
    if not torch.is_grad_enabled() or not inputs or not isinstance(inputs[0], Tensor) or inputs[0].requires_grad:
        return None
    return inputs[0].detach().requires_grad_(), *inputs[1:]
