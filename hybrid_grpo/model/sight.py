"""How a model sees: pictures in the tokens of a prompt, and the tower that makes embeddings of them.

A prompt carries pictures by reference. In the places that the model's processor gives a picture stand numbers below 0
(`visual_tokens`), each of which holds the picture's key and the number of one of its embeddings. So the same prompt is
the same list of numbers on every rank, in sampling and in training, in the journal and in checkpoints; the pictures
themselves stay where they were read from. `towers.text_forward` puts the embeddings in the places of these numbers.
The checkpoint's processor says how pictures enter a prompt.
"""

from __future__ import annotations

import importlib.util
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from hybrid_grpo.config import PolicyConfig
from hybrid_grpo.config.errors import UserError, refuse
from hybrid_grpo.model.gguf import files_of
from hybrid_grpo.model.loading import first_line, load_config, load_weights, without_dropout
from hybrid_grpo.model.towers import has_tower, outside_deepspeed, tower_class
from hybrid_grpo.model.upload import upload
from hybrid_grpo.model.visual_tokens import key_of, keys_of

Pixels = Callable[[int], dict[str, Tensor]]
"""Returns what the tower takes of the picture with this key."""
_OF_PICTURES = ("image_size", "patch_size", "spatial_merge_size", "temporal_patch_size", "pooling_kernel_size")
"""Fields of a tower's configuration that decide how many tokens a picture takes."""


@dataclass(frozen=True)
class ImageEmbedding:
    """What a tower makes of a picture."""

    rows_ND: Tensor
    """The embeddings, in the place of those of tokens."""
    deep: tuple[Tensor, ...]
    """[N, D] each: what is added to hidden states after the first layers (DeepStack, arXiv:2406.04334)."""


@dataclass(frozen=True)
class _Extent:
    """The positions that a picture takes."""

    offsets_AN: np.ndarray
    """Positions of its tokens on each axis, relative to that of the first."""
    advance: int
    """Distance from its first position to that of the token after it."""


class VisionEncoder:
    """The tower of a policy, frozen, with what it made of pictures.

    Every picture goes through the tower by itself, so that its embeddings do not depend on others. They are kept in
    host memory, the latest up to `cache_bytes`, for the next sampling and for training.

    Args:
        tower: a model with towers, of which `get_image_features` is called; see `towers.tower_class`.
        pixels: returns what the tower takes of a picture.

    Attributes:
        axes: number of axes that the text model counts positions on, if pictures are placed on several; else 1.
        both_ways: in which layers the tokens of a picture attend to each other in both directions.
        runs: number of times that the tower ran.
    """

    def __init__(self, tower: Any, pixels: Pixels, device: torch.device, cache_bytes: int) -> None:
        self.tower, self.device, self.runs = tower.eval().requires_grad_(False).to(device), device, 0
        self._pixels, self._room = pixels, cache_bytes
        self._looks: OrderedDict[int, ImageEmbedding] = OrderedDict()
        self._extents: dict[int, _Extent] = {}
        self._by_grid: dict[tuple[int, ...], _Extent] = {}
        self._base = tower.base_model
        self.axes = 3 if hasattr(self._base, "get_rope_index") else 1
        config = tower.config
        self.both_ways = reads_both_ways(config)
        self._token = image_token(config)

    @torch.inference_mode(False)
    @torch.no_grad()
    def look(self, key: int) -> ImageEmbedding:
        """Return what the tower makes of a picture."""
        if key in self._looks:
            self._looks.move_to_end(key)
            return self._looks[key]
        pixels = self._pixels(key)
        read = self._read(pixels)
        look = ImageEmbedding(read.rows_ND.cpu(), tuple(layer.cpu() for layer in read.deep))
        if key not in self._extents:
            self._extents[key] = self._extent(pixels.get("image_grid_thw"), len(look.rows_ND))
        self._looks[key] = look
        self._room -= _bytes(look)
        while self._room < 0 and len(self._looks) > 1:
            self._room += _bytes(self._looks.popitem(last=False)[1])
        return look

    def _read(self, pixels: Mapping[str, Tensor]) -> ImageEmbedding:
        """Run the tower on what `pixels` returns of a picture."""
        on_device = {name: value.to(self.device) for name, value in pixels.items()}
        found = self._base.get_image_features(**on_device, return_dict=True)
        rows = found.pooler_output
        rows_ND = (torch.cat(list(rows)) if isinstance(rows, list | tuple) else rows).flatten(0, -2)
        self.runs += 1
        deep = getattr(found, "deepstack_features", None) or ()
        return ImageEmbedding(rows_ND, tuple(torch.cat(list(layer)) for layer in deep))

    def _extent(self, grid: Tensor | None, count: int) -> _Extent:
        """Return the positions of a picture of `count` tokens, by transformers' own rule for the model."""
        if self.axes == 1 or grid is None:
            return _Extent(np.arange(count)[None], count)
        key = (count, *grid.flatten().tolist())
        if key not in self._by_grid:
            assert self._token is not None, "an album takes no picture without it"
            ids = torch.full((1, count + 1), self._token)
            kinds = torch.ones_like(ids, dtype=torch.int32)
            ids[0, -1] = kinds[0, -1] = 0
            position, _ = self._base.get_rope_index(ids, mm_token_type_ids=kinds, image_grid_thw=grid.cpu())
            self._by_grid[key] = _Extent(position[:, 0, :-1].numpy(), int(position[0, 0, -1]))
        return self._by_grid[key]

    def positions(self, tokens: Sequence[int]) -> tuple[np.ndarray, int]:
        """Return the position of each token of a text on each axis, [axes, tokens], and that of the token after it, by
        the rule of Qwen2-VL (arXiv:2409.12191, section 2.1)."""
        parts, at = [], 0
        for key, run in groupby(tokens, lambda token: key_of(token) if token < 0 else -1):
            count = len(list(run))
            if key < 0:
                parts.append(np.arange(at, at + count)[None].repeat(self.axes, 0))
                at += count
                continue
            if key not in self._extents:
                self.look(key)
            extent = self._extents[key]
            # A picture may stand there several times in a row.
            for _ in range(count // extent.offsets_AN.shape[1]):
                parts.append(extent.offsets_AN + at)
                at += extent.advance
        return np.concatenate(parts, axis=1), at

    def shown(self, tokens: Sequence[int], device: torch.device) -> ImageInputs | None:
        """Return the pictures in the flat tokens of a forward; None if there are none."""
        place_M = np.flatnonzero(np.array(tokens, dtype=np.int64) < 0)
        return ImageInputs(self, keys_of(tokens), upload(place_M, device)) if len(place_M) else None


@dataclass(frozen=True)
class ImageInputs:
    """The pictures in the tokens of a forward."""

    sight: VisionEncoder
    keys: list[int]
    place_M: Tensor
    """int64, the places of their tokens, flat."""

    def embedded(self, embeds_bSD: Tensor) -> tuple[Tensor, list[Tensor]]:
        """Return embeddings of tokens with those of the pictures in their places, and what is added to the hidden
        states there after the first layers, [M, D] each."""
        looks = [self.sight.look(key) for key in self.keys]
        rows_MD = torch.cat([look.rows_ND for look in looks]).to(embeds_bSD)
        deep = [torch.cat(layer).to(embeds_bSD) for layer in zip(*(look.deep for look in looks), strict=True)]
        return embeds_bSD.flatten(0, 1).index_copy(0, self.place_M, rows_MD).view_as(embeds_bSD), deep


def reads_both_ways(config: Any) -> Literal["all", "windows"] | None:
    """Return in which layers of a model the tokens of a picture attend to each other in both directions."""
    if getattr(config.get_text_config(decoder=True), "use_bidirectional_attention", None) == "vision":
        return "windows"
    return "all" if config.model_type == "gemma3" else None


def image_token(config: Any) -> int | None:
    """Return the token in the places of a picture in a checkpoint's own prompts; None if it names none."""
    named = (getattr(config, name, None) for name in ("image_token_id", "image_token_index"))
    return next((token for token in named if isinstance(token, int)), None)


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


def _bytes(look: ImageEmbedding) -> int:
    return sum(part.numel() * part.element_size() for part in (look.rows_ND, *look.deep))


def load_processor(name: str, setting: str = "policy.model") -> Any:
    """Load transformers' processor of a model. Raises UserError if there is none, or what it needs is not installed."""
    refuse(
        importlib.util.find_spec("PIL") is None,
        f"{setting} {name}: prompts have pictures, and pillow is not installed: pip install 'hybrid-grpo[pictures]'",
    )
    from transformers.models.auto.processing_auto import PROCESSOR_MAPPING

    try:
        name = files_of(name, setting)
        kind = PROCESSOR_MAPPING[type(load_config(name, setting))]
        # transformers needs torchvision for videos, and for pictures only if it is there.
        kind = kind if importlib.util.find_spec("torchvision") else without_videos(kind)
        processor = kind.from_pretrained(name, trust_remote_code=False)
    except Exception as error:  # transformers raises anything for files that it did not write
        raise UserError(f"{setting} {name}: its processor for pictures does not load: {first_line(error)}") from error
    refuse(
        getattr(processor, "image_token", None) is None,
        f"{setting} {name}: its processor ({type(processor).__name__}) names no token for pictures: take another model",
    )
    return processor


def without_videos(kind: Any) -> Any:
    """Return a class of processors that has parts for text and pictures only."""
    from transformers import AutoImageProcessor, AutoTokenizer

    parts = {"tokenizer": AutoTokenizer, "image_processor": AutoImageProcessor}

    def arguments(cls: Any, name: str, processor_dict: Any = None, **options: Any) -> list[Any]:
        return [
            parts[part].from_pretrained(name, **options) if part in parts else None for part in cls.get_attributes()
        ]

    def check(self: Any, name: str, argument: Any) -> Any:
        return None if argument is None else kind.check_argument_for_proper_class(self, name, argument)

    members = {"_get_arguments_from_pretrained": classmethod(arguments), "check_argument_for_proper_class": check}
    return type(kind.__name__, (kind,), {"__module__": kind.__module__, **members})


def load_tower(policy: PolicyConfig, setting: str = "policy.model") -> Any:
    """Load the tower of `policy.model`, on the CPU and outside the engine. Raises UserError as `load_weights` does."""
    config = load_config(policy.model, setting)
    plain, dtype = without_dropout(config), getattr(torch, policy.dtype)
    with outside_deepspeed():
        return load_weights(tower_class(config), policy.model, plain, setting, dtype=dtype)
