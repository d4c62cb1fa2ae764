"""Reward models: sequence classifiers of transformers that read a prompt and a completion and return a score.

A model occupies a device, so it is called in a thread of the rank, with many completions at once, while others are
sampled. Texts are written and tokenized by the model's own tokenizer, whatever the policy's is.
"""

import contextlib
import functools
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic.dataclasses import dataclass
from torch import Tensor

from hybrid_grpo.config.fields import Count, Switch, Text
from hybrid_grpo.rewards.functions import checked_settings
from hybrid_grpo.rewards.rules import Completions, completion_texts

Template = Literal["auto", "chat", "text"]
Dtype = Literal["auto", "float32", "bfloat16", "float16"]
Prompt = str | list[dict[str, Any]]
"""Text, or chat messages."""

_CLASSIFIER = "ForSequenceClassification"
_BATCH_TOKENS = {"cuda": 16384, "cpu": 2048}
"""Tokens of one forward. A CPU is slower where activations leave its caches."""


@dataclass(frozen=True)
class Settings:
    """Settings of `reward_model`."""

    model: Text
    device: Literal["auto", "cpu"]
    dtype: Dtype
    batch_tokens: Count | None
    max_tokens: Count | None
    template: Template
    sigmoid: Switch


class RewardModel:
    """A reward model and its tokenizer. `load` reads its weights; its configuration is checked here.

    Raises ValueError where there is no such model, where it is no sequence classifier of one or two labels, where it
    has no tokenizer, or where the settings do not suit it.
    """

    def __init__(self, settings: Settings) -> None:
        from hybrid_grpo.model.loading import load_tokenizer

        self.settings = settings
        self._config = _find_config(settings.model)
        self._tokenizer = load_tokenizer(settings.model, "model")
        if settings.template == "chat" and self._tokenizer.chat_template is None:
            raise ValueError(f"template chat: model {settings.model} has no chat template: set template to text")
        self._max_tokens = _max_tokens(settings, self._config, self._tokenizer)
        text_config = self._config.get_text_config()
        text_config.use_cache = False  # the model reads every text once
        dtype = str(text_config.dtype or self._config.dtype or "float32").removeprefix("torch.")
        self._dtype: torch.dtype = getattr(torch, dtype if settings.dtype == "auto" else settings.dtype)
        pad = text_config.pad_token_id
        self._pad_id = None if pad is None or pad < 0 else pad
        on_gpu = settings.device == "auto" and torch.cuda.is_available()
        self._device = torch.device("cuda", torch.cuda.current_device()) if on_gpu else torch.device("cpu")
        self._model: Any = None
        self._stream: Any = contextlib.nullcontext()
        # A call that took too long may still be running when the next one comes.
        self._turn = threading.Lock()

    def load(self) -> None:
        """Read the weights, unless they are loaded; ValueError where they are not those of a sequence classifier."""
        from transformers import AutoModelForSequenceClassification as Classifier

        from hybrid_grpo.model.loading import load_weights

        with self._turn:
            if self._model is not None:
                return
            model = load_weights(Classifier, self.settings.model, self._config, "model", dtype=self._dtype)
            self._model = model.to(self._device).eval().requires_grad_(False)
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
                # A stream of its own: decoding on the rank's stream would wait for every forward.
                self._stream = torch.cuda.stream(torch.cuda.Stream(self._device))

    def weight_bytes(self) -> int:
        """Bytes of the weights, computed from the model's configuration."""
        from transformers import AutoModelForSequenceClassification

        with torch.device("meta"):
            model = AutoModelForSequenceClassification.from_config(self._config)
        return sum(parameter.numel() for parameter in model.parameters()) * self._dtype.itemsize

    def tokens(self, prompt: Prompt, completion: str) -> tuple[list[int], int]:
        """The tokens that the model reads, and how many were cut off to make them `max_tokens`.

        The beginning is cut, so the prompt first; a beginning-of-sequence token stays. Raises ValueError where the
        prompt is a chat and there is no chat template, or where there is no token at all.
        """
        ids = self._chat(prompt, completion) if self._is_chat(prompt) else self._text(prompt, completion)
        if not ids:
            raise ValueError("prompt and completion are empty: there is nothing to score")
        cut = len(ids) - (self._max_tokens or len(ids))
        if cut <= 0:
            return ids, 0
        kept = int(ids[0] in (self._tokenizer.bos_token_id, self._tokenizer.cls_token_id))
        return ids[:kept] + ids[kept + cut :], cut

    def _is_chat(self, prompt: Prompt) -> bool:
        if self.settings.template != "auto":
            return self.settings.template == "chat"
        if isinstance(prompt, list) and self._tokenizer.chat_template is None:
            raise ValueError(
                f"the prompt is a chat and model {self.settings.model} has no chat template: set template to text"
            )
        return isinstance(prompt, list)

    def _chat(self, prompt: Prompt, completion: str) -> list[int]:
        """Tokens of a chat by the chat template, which writes the special tokens itself."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
        messages = [*messages, {"role": "assistant", "content": completion}]
        return list(self._tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False))

    def _text(self, prompt: Prompt, completion: str) -> list[int]:
        """Tokens of prompt and completion as one text, with the tokenizer's special tokens unless the text has them."""
        tokenizer = self._tokenizer
        text = (prompt if isinstance(prompt, str) else "".join(map(_line, prompt))) + completion
        ids = list(tokenizer(text)["input_ids"])
        if tokenizer.bos_token and text.startswith(tokenizer.bos_token) and ids[:2] == [tokenizer.bos_token_id] * 2:
            del ids[0]
        if tokenizer.eos_token and text.endswith(tokenizer.eos_token) and ids[-2:] == [tokenizer.eos_token_id] * 2:
            del ids[-1]
        return ids

    def scores(self, ids_B: Sequence[list[int]]) -> list[float]:
        """The scores of rows of tokens, [B]; see `reward_model`."""
        self.load()
        scores_B = [0.0] * len(ids_B)
        budget = self.settings.batch_tokens or _BATCH_TOKENS[self._device.type]
        with self._turn, self._stream, torch.no_grad():
            for rows in forwards([len(ids) for ids in ids_B], budget):
                logits_bL = self._logits([ids_B[row] for row in rows]).float()
                score_b = logits_bL[:, 0] if logits_bL.shape[1] == 1 else logits_bL[:, 1] - logits_bL[:, 0]
                score_b = score_b.sigmoid() if self.settings.sigmoid else score_b
                for row, score in zip(rows, score_b.tolist(), strict=True):
                    scores_B[row] = score
        return scores_B

    def _logits(self, ids_b: list[list[int]]) -> Tensor:
        """One forward of rows of tokens, padded on the right; [b, labels]."""
        # Decoders read the score at the last token whose id is not that of padding. A model without a padding token
        # reads it at the last token of a text; here it is given a padding token that no text of the batch ends in.
        pad = self._pad_id
        if pad is None:
            last = {ids[-1] for ids in ids_b}
            pad = next(token for token in range(len(last) + 1) if token not in last)
            self._model.config.get_text_config().pad_token_id = pad
        longest = max(map(len, ids_b))
        input_ids_bS = torch.tensor([ids + [pad] * (longest - len(ids)) for ids in ids_b], device=self._device)
        mask_bS = torch.tensor([[1] * len(ids) + [0] * (longest - len(ids)) for ids in ids_b], device=self._device)
        logits: Tensor = self._model(input_ids=input_ids_bS, attention_mask=mask_bS).logits
        return logits


def reward_model(
    prompts: list[Prompt],
    completions: Completions,
    log_extra: Callable[[str, list[Any]], None] | None = None,
    *,
    model: str,
    device: Literal["auto", "cpu"] = "auto",
    dtype: Dtype = "auto",
    batch_tokens: int | None = None,
    max_tokens: int | None = None,
    template: Template = "auto",
    sigmoid: bool = False,
) -> list[float]:
    """The score that a sequence classifier of transformers gives a prompt and its completion.

    It is the logit of a model with one label. For a model with two labels it is the second logit minus the first, the
    log-odds of the second label. It equals the score of the text alone, whatever else is in a batch.

    Args:
        model: folder or hub name.
        device: `auto` is the rank's own.
        dtype: type of weights and activations; `auto` is the checkpoint's.
        batch_tokens: tokens of one forward, padding included. Default: 16,384 on a GPU and 2,048 on a CPU.
        max_tokens: longest text; longer ones lose their beginning. Default: the number of positions of the model.
        template: `chat` uses the model's chat template and takes a text prompt as the user's message; `text` joins
            prompt and completion, each message on a line; `auto` is `chat` for chat prompts and `text` for others.
        sigmoid: return the sigmoid of the score, for two labels the probability of the second.
    """
    held_model = _held(checked_settings(Settings, model, device, dtype, batch_tokens, max_tokens, template, sigmoid))
    texts = zip(prompts, completion_texts(completions), strict=True)
    tokens = [held_model.tokens(prompt, completion) for prompt, completion in texts]
    if log_extra is not None and any(cut for _, cut in tokens):
        log_extra("cut_tokens", [cut for _, cut in tokens])
    return held_model.scores([ids for ids, _ in tokens]) if tokens else []


reward_model.batch_size = 32  # type: ignore[attr-defined]


def held(kwargs: dict[str, Any]) -> RewardModel:
    """The model that `reward_model` uses with these settings; it is made once in a process."""
    return _held(Settings(**{**(reward_model.__kwdefaults__ or {}), **kwargs}))


@functools.cache
def _held(settings: Settings) -> RewardModel:
    return RewardModel(settings)


def forwards(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Batches of rows of similar length, of at most `batch_tokens` tokens with padding.

    The longest rows come first, so that the first forward allocates the memory that all later ones reuse. A row that is
    longer than `batch_tokens` is a batch of its own.
    """
    batches: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if batches and (len(batches[-1]) + 1) * lengths[batches[-1][0]] <= batch_tokens:
            batches[-1].append(row)
        else:
            batches.append([row])
    return batches


def _find_config(name: str) -> Any:
    """The configuration of a folder or hub name; ValueError where it is no sequence classifier of 1 or 2 labels."""
    from transformers import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING

    from hybrid_grpo.model.loading import load_config

    if name.startswith(("/", ".", "~")) and not Path(name).is_dir():
        raise ValueError(f"model {name}: there is no such folder")
    config = load_config(name, "model")
    classes = config.architectures or []
    if type(config) not in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING or config.is_encoder_decoder:
        raise ValueError(f"model {name} is a {config.model_type}: take a ...{_CLASSIFIER} that is no encoder-decoder")
    if classes and not any(_CLASSIFIER in each for each in classes):
        raise ValueError(f"model {name} is a {classes[0]}: take one that was trained as a ...{_CLASSIFIER}")
    if config.num_labels > 2:
        raise ValueError(f"model {name} has {config.num_labels} labels: a reward model has 1, or 2, bad and good")
    return config


def _max_tokens(settings: Settings, config: Any, tokenizer: Any) -> int | None:
    """Number of tokens that the model reads of a text; None where it has no limit."""
    positions = getattr(config.get_text_config(), "max_position_embeddings", None)
    limits = [n for n in (positions, tokenizer.model_max_length) if isinstance(n, int) and n < 10**9]
    if settings.max_tokens is None:
        return min(limits, default=None)
    if positions is not None and settings.max_tokens > positions:
        raise ValueError(f"max_tokens {settings.max_tokens}: model {settings.model} has {positions} positions")
    return settings.max_tokens


def _line(message: dict[str, Any]) -> str:
    if not isinstance(message["content"], str):
        raise ValueError(f"a message has content {message['content']!r:.40}, which is no text: set template to chat")
    return message["content"] + "\n"
