"""Reward models: sequence classifiers of transformers that score a prompt and a completion.

A model is called in a thread of the rank, with many completions at once, while others are being sampled. A model that
is sharded over the ranks (ZeRO-3) is called by all of them together, after sampling. Texts are formatted and tokenized
by the model's own tokenizer, and with pictures by its own processor, if it sees any.

This module does not depend on an engine: its caller provides the function that shards a model.
"""

import contextlib
import functools
import math
import re
import threading
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor, nn

from hybrid_grpo.config.fields import Count, Switch, Text, checked_settings
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.distributed.workers.calls import Call, Failure, Reply
from hybrid_grpo.rewards.models.reward_text import TOKEN_KINDS, chat_tokens, seen_chat, text_tokens
from hybrid_grpo.rewards.rules import Completions, LogExtra, PromptText, completion_texts

Template = Literal["auto", "chat", "text"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Shard = Callable[[Callable[[], Any], str], Any]
"""Takes a function that reads a model, and the type of the model's weights. Returns the forward function of the sharded
model, which has an attribute `device`."""

_CLASSIFIER = "ForSequenceClassification"
_BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Maximum number of tokens in one forward pass. A CPU is slower if activations do not fit into its caches."""


@dataclass(frozen=True)
class RewardModelSettings:
    model: Text
    device: str
    dtype: Dtype
    batch_tokens: Count | None
    max_tokens: Count | None
    template: Template
    sigmoid: Switch
    zero_stage: Literal[0, 3]


class Row(NamedTuple):
    """What a model reads of a prompt and a completion: tokens, and all else that its processor makes of pictures."""

    ids: list[int]
    seen: dict[str, Tensor]

    @property
    def kind(self) -> tuple[Any, ...]:
        """Equal for rows that can share a forward; empty without pictures."""
        return tuple((name, *value.shape[1:]) for name, value in self.seen.items() if name not in TOKEN_KINDS)


class RewardModel:
    """A reward model and its tokenizer; the weights are read by `load`. Raises ValueError if there is no such model, if
    it is no sequence classifier with one or two labels, has no tokenizer, or does not suit the settings."""

    def __init__(self, settings: RewardModelSettings) -> None:
        from hybrid_grpo.data.pictures import ImageStore
        from hybrid_grpo.model.loading import load_tokenizer

        self.settings = settings
        self._config = _find_config(settings.model)
        self._tokenizer = load_tokenizer(settings.model, "model")
        self._album = ImageStore.of(settings.model, self._config)
        self._config.get_text_config().use_cache = False  # every text is read once
        self._dtype = _dtype(settings, self._config)
        self._max_tokens = _max_tokens(settings, self._config, self._tokenizer)
        if settings.template == "chat" and self._tokenizer.chat_template is None:
            raise ValueError(f"template chat: model {settings.model} has no chat template: set template to text")
        if self.sharded and settings.device != "auto":
            raise ValueError("zero_stage 3 shards the model over the devices of all ranks: leave device out")
        self._device: Any = None if self.sharded else _device(settings.device)
        self._forward: Any = None
        self._classifier: Any = None
        self._pad_id: int | None = None
        self._stream: Any = contextlib.nullcontext()
        # A call that has timed out may still be running when the next one comes.
        self._lock = threading.Lock()

    @property
    def sharded(self) -> bool:
        """Whether the model is sharded, so that all ranks must call it together."""
        return self.settings.zero_stage == 3

    @property
    def on_host(self) -> bool:
        """Whether the model's weights are in host memory."""
        return self.sharded or self.settings.device == "cpu"

    def load(self, shard: Shard | None = None) -> None:
        """Read the weights, unless they are loaded. Collective if sharded. Raises ValueError if the weights do not load
        or do not belong to a sequence classifier."""
        with self._lock:
            if self._forward is not None:
                return
            if self.sharded:
                if shard is None:
                    raise ValueError("zero_stage 3 needs the ranks of a training run: set zero_stage to 0")
                self._forward = shard(self._read, self._dtype)
                self._device = self._forward.device
                return
            self._forward = self._read().to(self._device).eval().requires_grad_(False)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                # If they shared the rank's stream, decoding would wait for every forward.
                self._stream = torch.cuda.stream(torch.cuda.Stream(self._device))

    def _read(self) -> Any:
        from transformers import AutoModelForSequenceClassification

        from hybrid_grpo.model.loading import load_weights

        dtype = getattr(torch, self._dtype)
        model = load_weights(
            AutoModelForSequenceClassification, self.settings.model, self._config, "model", dtype=dtype
        )
        self._classifier = model.config.get_text_config()
        pad = self._classifier.pad_token_id
        self._pad_id = None if pad is None or pad < 0 else pad
        return model

    def bytes_of(self, ranks: int) -> int:
        """Bytes of the weights on each rank, computed from the model's configuration."""
        from transformers import AutoModelForSequenceClassification

        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(self._config)
        parameters = sum(parameter.numel() for parameter in model.parameters())
        return parameters * int(getattr(torch, self._dtype).itemsize) // (ranks if self.sharded else 1)

    def tokens(self, prompt: PromptText, completion: str) -> tuple[list[int], int]:
        """Return the tokens that the model reads, at most `max_tokens`, and the number of tokens that were cut off.
        Tokens are cut off at the beginning, but a beginning-of-sequence token is kept. Raises ValueError if there is no
        token at all, or if the prompt is a chat and there is no chat template."""
        ids = (chat_tokens if self._is_chat(prompt) else text_tokens)(self._tokenizer, prompt, completion)
        if not ids:
            raise ValueError("prompt and completion are empty: there is nothing to score")
        cut = len(ids) - (self._max_tokens or len(ids))
        if cut <= 0:
            return ids, 0
        kept = int(ids[0] in (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id))
        return ids[:kept] + ids[kept + cut :], cut

    def row(self, prompt: PromptText, completion: str, pictures: Sequence[Picture] = ()) -> tuple[Row, int]:
        """Return what the model reads, and the number of tokens that were cut off; see `tokens`. A model that sees
        nothing reads the text alone. Raises ValueError like `check_pictures`, and if pictures do not fit."""
        if not pictures or self._album is None:
            ids, cut = self.tokens(prompt, completion)
            return Row(ids, {}), cut
        self.check_pictures()
        seen = seen_chat(self._album, prompt, completion, pictures)
        ids = seen.pop("input_ids")[0].tolist()
        if self._max_tokens is not None and len(ids) > self._max_tokens:
            raise ValueError(
                f"the prompt and the completion have {len(ids)} tokens with their pictures, more than max_tokens"
                f" {self._max_tokens}, and none can be cut off: raise it, or set data.max_pixels"
            )
        return Row(ids, seen), 0

    def check_pictures(self) -> None:
        """Raise ValueError if the model sees, but takes no prompts with pictures, or UserError without a processor."""
        if self._album is None:
            return
        if self.settings.template == "text":
            raise ValueError("prompts have pictures, which have no place with template text: set template to chat")
        if self._album.template is None:
            raise ValueError(f"prompts have pictures, and model {self.settings.model} has no chat template")

    def _blank(self, *, sees: bool) -> Row:
        """A row for a forward in which this rank has none, and the others have rows with or without pictures."""
        if not sees or self._album is None:
            return Row([0], {})
        seen = self._album.seen(self._album.processor.image_token, [self._album.blank_image])
        return Row(seen.pop("input_ids")[0].tolist(), seen)

    def _is_chat(self, prompt: PromptText) -> bool:
        if self.settings.template != "auto":
            return self.settings.template == "chat"
        if isinstance(prompt, list) and self._tokenizer.chat_template is None:
            raise ValueError(
                f"the prompt is a chat and model {self.settings.model} has no chat template: set template to text"
            )
        return isinstance(prompt, list)

    def scores(self, rows_B: Sequence[Row]) -> list[float]:
        """Return the scores, [B], of rows. Collective if sharded; each rank may have any number of rows."""
        from hybrid_grpo.data.packing import plan_rows
        from hybrid_grpo.distributed.ranks import all_reduce

        self.load()
        scores_B = [0.0] * len(rows_B)
        of_kind: dict[tuple[Any, ...], list[int]] = defaultdict(list)
        for number, row in enumerate(rows_B):
            of_kind[row.kind].append(number)
        with self._lock, self._stream, torch.no_grad():
            budget = self.settings.batch_tokens or _BATCH_TOKENS[self._device.type]
            batches: dict[bool, list[list[int]]] = {True: [], False: []}
            for kind, numbers in of_kind.items():
                shares = plan_rows([len(rows_B[number].ids) for number in numbers], [1] * len(numbers), budget)
                batches[bool(kind)] += [[numbers[index] for index in share] for share in shares]
            if self.sharded:  # every rank runs the same forwards, also through the tower; those without rows come last
                counts = torch.tensor([len(batches[True]), len(batches[False])], device=self._device)
                for of_rank, most in zip(batches.values(), all_reduce(counts, "max").tolist(), strict=True):
                    of_rank += [[]] * (most - len(of_rank))
            for sees, batch in ((sees, batch) for sees, of_rank in batches.items() for batch in of_rank):
                rows = [rows_B[number] for number in batch] or [self._blank(sees=sees)]
                logits_bL = self._logits(rows)[: len(batch)].float()
                score_b = logits_bL[:, 0] if logits_bL.shape[1] == 1 else logits_bL[:, 1] - logits_bL[:, 0]
                score_b = score_b.sigmoid() if self.settings.sigmoid else score_b
                for number, score in zip(batch, score_b.tolist(), strict=True):
                    scores_B[number] = score
        return scores_B

    def _logits(self, rows_b: list[Row]) -> Tensor:
        """Run one forward pass on rows of one kind, padded on the right; return the logits, [b, labels]."""
        # Decoders read the score at the last token that is not padding. A model without a padding token is given one
        # with which no text of the batch ends.
        ids_b = [row.ids for row in rows_b]
        if self._pad_id is None:
            last = {ids[-1] for ids in ids_b}
            self._classifier.pad_token_id = next(token for token in range(len(last) + 1) if token not in last)
        pad = self._classifier.pad_token_id
        longest = max(map(len, ids_b))
        input_ids_bS = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in ids_b], device=self._device)
        mask_bS = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in ids_b], device=self._device)
        seen = {name: [row.seen[name] for row in rows_b] for name in rows_b[0].seen}
        for name in TOKEN_KINDS & seen.keys():
            seen[name] = [nn.functional.pad(kinds, (0, longest - kinds.shape[1])) for kinds in seen[name]]
        given = {name: torch.cat(values).to(self._device) for name, values in seen.items()}
        logits: Tensor = self._forward(input_ids=input_ids_bS, attention_mask=mask_bS, **given).logits
        return logits

    def reply(self, call: Call) -> Reply:
        """Score a rank's rows with a model that all ranks call together. A row whose text cannot be formatted fails
        alone. Any other error ends the run, as the other ranks wait."""
        prompts, completions = call.inputs["prompts"], completion_texts(call.inputs["completions"])
        pictures = call.inputs.get("prompt_images") or [()] * len(prompts)
        read: dict[int, Row] = {}
        kept: dict[tuple[int, ...], dict[str, Tensor]] = {}
        cut = [0] * len(prompts)
        values: list[Any] = [None] * len(prompts)
        failures: list[Failure | None] = [None] * len(prompts)
        for row, (prompt, completion, shown) in enumerate(zip(prompts, completions, pictures, strict=True)):
            try:
                found, cut[row] = self.row(prompt, completion, shown)
                # The rows of a group have the same pictures, whose pixels are kept once.
                of_pictures = kept.setdefault(tuple(picture.key for picture in shown), found.seen)
                pixels = {name: value for name, value in of_pictures.items() if name not in TOKEN_KINDS}
                read[row] = found._replace(seen=found.seen | pixels)
            except Exception as error:  # most likely from the chat template
                failures[row] = Failure("raised", f"raised {describe(error, None)}")
        for row, score in zip(read, self.scores(list(read.values())), strict=True):
            if math.isfinite(score):
                values[row] = score
            else:
                failures[row] = Failure("invalid", f"gave {score}")
        return Reply(values, failures, {"cut_tokens": cut} if any(cut) else {})


_held = functools.cache(RewardModel)


def reward_model(
    prompts: list[PromptText], completions: Completions, prompt_images: list[tuple[Picture, ...]] | None = None,
    log_extra: LogExtra | None = None, *, model: str, device: str = "auto", dtype: Dtype = "auto",
    batch_tokens: int | None = None, max_tokens: int | None = None, template: Template = "auto", sigmoid: bool = False,
    zero_stage: Literal[0, 3] = 0,
) -> list[float]:  # fmt: skip
    """Score prompts with their completions by a sequence classifier of transformers; docs/rewards/models.md has the
    settings, and what a score is. Raises ValueError like `RewardModel` and `RewardModel.row`."""
    settings = checked_settings(
        RewardModelSettings, model, device, dtype, batch_tokens, max_tokens, template, sigmoid, zero_stage
    )
    held_model = _held(settings)
    asked = zip(prompts, completion_texts(completions), prompt_images or [()] * len(prompts), strict=True)
    rows = [held_model.row(prompt, completion, pictures) for prompt, completion, pictures in asked]
    if log_extra is not None and any(cut for _, cut in rows):
        log_extra("cut_tokens", [cut for _, cut in rows])
    return held_model.scores([row for row, _ in rows]) if rows else []


reward_model.batch_size = 32  # type: ignore[attr-defined]


def held(kwargs: dict[str, Any]) -> RewardModel:
    """Return the model that `reward_model` uses with these settings; it is made once per process."""
    return _held(RewardModelSettings(**{**(reward_model.__kwdefaults__ or {}), **kwargs}))


def _find_config(name: str) -> Any:
    """The configuration of a model; raises ValueError if it is not a sequence classifier with 1 or 2 labels."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from hybrid_grpo.model.loading import load_config

    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ValueError(f"model {name}: there is no such folder")
    config = load_config(name, "model")
    classes = config.architectures or []
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.is_encoder_decoder:
        raise ValueError(
            f"model {name} ({config.model_type}) is an encoder-decoder or has no classifier: take another"
            f" ...{_CLASSIFIER}"
        )
    if classes and not any(_CLASSIFIER in each for each in classes):
        raise ValueError(f"model {name} is a {classes[0]}: take one that was trained as a ...{_CLASSIFIER}")
    if config.num_labels > 2:
        raise ValueError(f"model {name} has {config.num_labels} labels: a reward model has 1, or 2 (bad and good)")
    return config


def _dtype(settings: RewardModelSettings, config: Any) -> str:
    if settings.dtype == "auto":
        dtype = str(config.get_text_config().dtype or config.dtype or "float32").removeprefix("torch.")
    else:
        dtype = settings.dtype
    if settings.zero_stage == 3 and dtype not in ("float32", "bfloat16"):
        raise ValueError(f"zero_stage 3 does not support {dtype} for model {settings.model}: set dtype to bfloat16")
    return dtype


def _max_tokens(settings: RewardModelSettings, config: Any, tokenizer: Any) -> int | None:
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (positions, tokenizer.model_max_length) if isinstance(n, int) and n < 10**9]
    if settings.max_tokens is None:
        return min(limits, default=None)
    if positions is not None and settings.max_tokens > positions:
        raise ValueError(f"max_tokens {settings.max_tokens}: model {settings.model} has {positions} positions")
    return settings.max_tokens


def _device(name: str) -> torch.device:
    if not re.fullmatch(r"auto|cpu|cuda(:\d+)?", name):
        raise ValueError(f"device {name!r} must be auto, cpu, cuda or cuda:NUMBER")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ValueError(f"device {name}: there is no GPU: set it to cpu")
    index = int(name.partition(":")[2]) if ":" in name else torch.cuda.current_device()
    if index >= torch.cuda.device_count():
        raise ValueError(f"device {name}: there are {torch.cuda.device_count()} GPUs, counted from 0")
    return torch.device("cuda", index)
