"""Settings of the model that is trained, its adapters, its optimizer and the DeepSpeed engine."""

from dataclasses import field, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import yaml
from annotated_types import Ge, Le, Lt
from pydantic import model_validator
from pydantic.dataclasses import dataclass

from hybrid_grpo.config.about import MAY_CHANGE, About
from hybrid_grpo.config.errors import did_you_mean, refuse, refuse_indivisible
from hybrid_grpo.config.fields import HOME, SECTION, Count, NotNegative, Number, Positive, Switch, Text, Whole

_Decay = Annotated[Number, Ge(0), Lt(1)]
_LOADING = About(unused_by="score", may_change=True)
"""Marks settings that only loading a model needs."""


@dataclass(frozen=True, config=SECTION)
class PolicyConfig:
    """The model that is trained and its optimizer."""

    about = About(unused_by="eval generate chat score", rank=9)
    model: Annotated[str, HOME, About(usual=1, in_eval=1, in_plan=1, unused_by="", rank=0, is_place=True)] = ""
    """Folder or hub name of the initial model and its tokenizer."""
    dtype: Annotated[Literal["bfloat16", "float32"], About(usual=4, in_eval=5, in_plan=1, unused_by="score")] = (
        "bfloat16"
    )
    """Data type of the weights in forward and backward passes. The optimizer always keeps float32 weights."""
    attn_implementation: Annotated[Literal["auto", "packed", "sdpa", "eager", "flash_attention_2"], _LOADING] = "auto"
    """Attention implementation in training. `packed` computes no padding, using flash-attn's kernels if it is
    installed, and torch's otherwise. `auto` is `packed` for architectures that allow it, and `sdpa` for others. The
    other values are transformers' implementations, on padded rows (flash_attention_2 needs the extra `flash`)."""
    shared_prefix: Annotated[Literal["auto", "on", "off"], MAY_CHANGE] = "auto"
    """With `packed`, compute what rows begin with only once in training too, as in sampling: the prompt of a group, and
    pieces of 8 tokens or more that histories of an agent have in common. The result is exact;
    `auto` does so if it saves time."""
    routing: Literal["auto", "replay", "free"] = "auto"
    """In a mixture of experts, `replay` makes training use the experts that each token used while it was sampled (R3,
    arXiv:2510.11370); with `free`, routers choose again, and rounding makes them choose others. `auto` replays in
    bfloat16 if the model's routers allow it. The reference is always free."""
    gradient_checkpointing: Annotated[Switch | Literal["offload"] | None, About(in_plan=2), MAY_CHANGE] = None
    """Recompute each layer's activations in the backward pass instead of keeping them; of long rows, not attention.
    `offload` also recomputes that, and on a GPU keeps what goes into layers in host memory. Default: as needed."""
    lr: Annotated[Positive, About(usual=3, rank=1)] = 1e-6
    """Peak learning rate."""
    lr_schedule: Literal["constant", "linear", "cosine"] = "constant"
    """Shape of the learning rate after warm-up; linear and cosine reach 0 at the last step."""
    warmup_steps: Whole = 0
    """Number of optimizer steps over which the learning rate rises linearly from 0."""
    weight_decay: NotNegative = 0.0
    """AdamW weight decay."""
    betas: tuple[_Decay, _Decay] = (0.9, 0.95)
    """Decay rates of AdamW's first and second moments."""
    max_grad_norm: Positive = 1.0
    """Global gradient norm above which gradients are scaled down."""
    micro_batch_tokens: Annotated[Count | None, About(in_plan=1), MAY_CHANGE] = None
    """Maximum number of tokens in a forward and backward pass on a rank, padding included. A longer row gets its own
    pass. Default: 16,384 on a GPU and 4,096 on a CPU, or fewer where the plan of memory needs that."""
    picture_cache_gb: Positive = 2.0
    """GiB of host memory of a rank for what the tower made of pictures, which is kept for training and later steps."""
    verify: Annotated[Literal["auto", "on", "off"], MAY_CHANGE] = "auto"
    """Before the first step, compare the log-probabilities of 16 tokens with those of transformers' own model, which
    rank 0 loads on the CPU, and refuse a model that differs. `auto` does so up to 1.5 billion parameters."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        refuse(
            self.shared_prefix == "on" and self.attn_implementation not in ("auto", "packed"),
            f"policy.shared_prefix on needs packed rows, and policy.attn_implementation {self.attn_implementation} pads"
            " them: set policy.attn_implementation to auto",
        )
        return self


@dataclass(frozen=True, config=SECTION)
class LoraConfig:
    """Low-rank adapters (LoRA, arXiv:2106.09685): the model's weights stay as they are, and small matrices next to its
    linear layers are trained (needs the extra `lora`)."""

    about = About(rank=9)
    rank: Annotated[Whole, About(in_plan=4, rank=7)] = 0
    """Rank of the adapters; 0 trains the weights themselves."""
    alpha: Count = 32
    """An adapter adds alpha / rank times the product of its two matrices to the weight of its layer."""
    target_modules: list[Text] | Literal["all-linear"] = "all-linear"
    """Layers that get an adapter, given by the ends of their names, as in [q_proj, v_proj]. `all-linear` means every
    linear layer except the output head and, beside experts that are one tensor, dense MLPs named like these."""
    load_in_4bit: Annotated[Switch, About(in_plan=4)] = False
    """Keep the frozen weights of linear layers in four bits. They are NF4 with double quantization (QLoRA,
    arXiv:2305.14314; extra `qlora`), those of the embedding and the head int8, whole on every rank: engine.zero_stage
    is at most 2. Sampling and exports use the same numbers in policy.dtype."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        for entry in fields(self)[1:]:
            refuse(
                not self.rank and getattr(self, entry.name) != entry.default,
                f"lora.{entry.name} is set, but without lora.rank there are no adapters: set lora.rank, or remove it",
            )
        refuse(
            not self.target_modules,
            f"lora.target_modules {self.target_modules}: name layers, as in [q_proj, v_proj], or all-linear",
        )
        return self


_OF_SHARDS = ("offload_param", "zero_hpz_partition_size")
"""Sections of zero_optimization that concern sharded weights."""
_DEEPSPEED = yaml.safe_load(Path(__file__).with_name("deepspeed_settings.yaml").read_text(encoding="utf-8"))
"""Which settings DeepSpeed has, and which of them are derived or refused here."""


@dataclass(frozen=True, config=SECTION)
class EngineConfig:
    """The DeepSpeed engine."""

    about = About(rank=11)
    zero_stage: Annotated[Annotated[Whole, Le(3)] | None, About(usual=5, in_plan=3), MAY_CHANGE] = None
    """ZeRO stage of the policy: 3 shards weights, gradients and optimizer state over the ranks, 2 keeps the weights
    whole, which saves fetching them. Default: 3, or 2 on a single rank and wherever `train` plans enough memory."""
    offload_optimizer: Annotated[Switch | Literal["between_steps"], About(in_plan=3), MAY_CHANGE] = False
    """Keep optimizer state in host memory and step there (ZeRO stage 1 or higher). `between_steps` steps on the GPU,
    where the state then is for no longer than that (stage 2 or 3)."""
    sequence_parallel: Annotated[Count, About(in_plan=3), MAY_CHANGE] = 1
    """Number of neighboring ranks that compute each row's training pass together (Ulysses, arXiv:2309.14509), each with
    its share of the tokens, for rows that are too long for one. Decoding stays on every rank by itself."""
    timeout_minutes: Annotated[Positive, MAY_CHANGE] = 30.0
    """Minutes that a rank waits for the others in one collective operation before it fails."""
    deepspeed: Annotated[dict[str, Any], MAY_CHANGE] = field(default_factory=dict)
    """DeepSpeed settings that are merged over the configuration built here, section by section."""

    @property
    def fetching(self) -> dict[str, Any]:
        """DeepSpeed's settings for how ZeRO-3 fetches weights. They apply to the reference too."""
        zero = self.deepspeed.get("zero_optimization", {})
        return {name: value for name, value in zero.items() if name.startswith("stage3_")}

    def stage(self, ranks: int) -> int:
        """Return the ZeRO stage on a number of ranks."""
        if self.zero_stage is not None:
            return self.zero_stage
        needs_shards = self.fetching or any(self._given(f"zero_optimization.{name}") for name in _OF_SHARDS)
        return 3 if ranks > 1 or needs_shards else 2

    @model_validator(mode="after")
    def _check(self) -> Self:
        parks = self.offload_optimizer == "between_steps"
        refuse(
            bool(self.offload_optimizer) and self.zero_stage in ((0, 1) if parks else (0,)),
            f"engine.offload_optimizer needs engine.zero_stage {'2' if parks else '1'} or higher: set it to 2 or 3",
        )
        refuse(
            parks and bool(self._given("zero_optimization.offload_optimizer")),
            "engine.offload_optimizer between_steps steps on the GPU, and"
            " engine.deepspeed.zero_optimization.offload_optimizer on the host: remove one of them",
        )
        for owned, origin in _DEEPSPEED["owned"].items():
            refuse(bool(self._given(owned)), f"engine.deepspeed.{owned} is {origin}: remove it from engine.deepspeed")
        for name, why in _DEEPSPEED["unsupported"].items():
            refuse(any(self._given(name)), f"engine.deepspeed.{name} is not supported ({why}): remove it")
        for name, why in (
            ("offload_param", "generation gathers weights from memory"),
            ("offload_optimizer", "checkpoints hold what is in memory"),
        ):
            refuse(
                "nvme" in self._given(f"zero_optimization.{name}.device"),
                f"engine.deepspeed.zero_optimization.{name}.device nvme is not supported ({why}): set it to cpu",
            )
        for name in _OF_SHARDS:
            refuse(
                bool(self._given(f"zero_optimization.{name}")) and self.zero_stage in (0, 1, 2),
                f"engine.deepspeed.zero_optimization.{name} concerns sharded weights, which engine.zero_stage"
                f" {self.zero_stage} does not have: remove it, or set engine.zero_stage to 3",
            )
        return self

    def check(self, world_size: int) -> None:
        """Raise UserError for settings that DeepSpeed does not have, or that do not fit the number of ranks."""
        known = _DEEPSPEED["sections"]
        for name in self.deepspeed:
            refuse(
                name not in known, f"engine.deepspeed.{name} is not a setting of DeepSpeed: {did_you_mean(name, known)}"
            )
        refuse_indivisible("ranks", world_size, self.sequence_parallel, "engine.sequence_parallel")
        name = "zero_optimization.zero_hpz_partition_size"
        for size in self._given(name):
            refuse(
                size not in range(1, world_size + 1) or world_size % size != 0,
                f"engine.deepspeed.{name} {size} does not divide {world_size} ranks: give the GPUs of a machine",
            )

    def _given(self, name: str) -> list[Any]:
        """Return a list with the value of a DeepSpeed setting; empty if the setting is not given."""
        section, path = self.deepspeed, "engine.deepspeed"
        *above, last = name.split(".")
        for key in above:
            section, path = section.get(key, {}), f"{path}.{key}"
            refuse(not isinstance(section, dict), f"{path} {section!r} must be a section of DeepSpeed's settings")
        return [section[last]] if last in section else []
