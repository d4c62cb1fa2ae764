"""Checks that a second model fits the policy: it reads the same tokens, laid out in the same way."""

from __future__ import annotations

from typing import Any

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.loading import load_config, load_tokenizer, training_attention
from hybrid_grpo.model.sight import image_token
from hybrid_grpo.model.towers import has_tower

_OF_PICTURES = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "pooling_kernel_size")
"""Fields of a tower's configuration that decide how many tokens a picture takes."""


def check_sight(model_config: Any, policy_config: Any, setting: str) -> None:
    """Refuse a model that does not read the policy's pictures, or in other places, before weights load."""
    refuse(not has_tower(model_config), f"{setting} reads no pictures, and prompts have some: take a model that does")

    def layout(config: Any) -> list[Any]:
        tower = getattr(config, "vision_config", None)
        return [config.model_type, image_token(config), *(getattr(tower, name, None) for name in _OF_PICTURES)]

    refuse(
        layout(model_config) != layout(policy_config),
        f"{setting} reads pictures otherwise than policy.model: take one of the same family of models",
    )


def check_compatible(own: PolicyConfig, model_config: Any, policy: PolicyConfig, tokenizer: Any, setting: str) -> None:
    """Refuse a model whose files, tokenizer or attention do not match the policy's, before weights load.

    `own` and `model_config` belong to the model to check, which `setting` (ROLE.NAME) names; `policy` and `tokenizer`
    belong to the policy.
    """
    check_files(own.model, model_config, pickled=own.pickled_weights, setting=setting)
    refuse(
        load_tokenizer(own.model, setting).get_vocab() != tokenizer.get_vocab(),
        f"{setting} {own.model} has a different tokenizer from policy.model {policy.model}: use a"
        f" {setting.partition('.')[0]} of the same family of models",
    )
    packs, policy_packs = (
        training_attention(chosen, loaded) == ATTENTION
        for chosen, loaded in ((own, model_config), (own, load_config(policy.model)))
    )
    refuse(
        packs != policy_packs,
        f"{setting} {own.model} and policy.model cannot read the same rows, since only one of them needs padding: set"
        " policy.attn_implementation to sdpa",
    )
