"""Sources of guests' completions: a file, or a frozen model. How the completions are used is decided in guests.py."""

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from hybrid_grpo.config import DataConfig, TrainConfig
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.data.batch import Rollout
from hybrid_grpo.data.chat_template import ended_ids
from hybrid_grpo.data.completion import Completion, Message, Prompt, whole_characters
from hybrid_grpo.data.completions import end_of, read_completions
from hybrid_grpo.data.picture import Picture, read_picture
from hybrid_grpo.data.pictures import ImageStore, given_pictures, sight_of
from hybrid_grpo.distributed.hardware import device_bytes
from hybrid_grpo.features.guests.settings import GuestConfig
from hybrid_grpo.generation import Callbacks, Request, stream_key
from hybrid_grpo.generation.rollout import attention_of, complete, sampling_of
from hybrid_grpo.generation.workspace import workspace_beside
from hybrid_grpo.model.architectures import check_architecture
from hybrid_grpo.model.files import check_files
from hybrid_grpo.model.limits import check_lengths, stop_ids
from hybrid_grpo.model.loading import load_config, load_model, load_tokenizer
from hybrid_grpo.model.reading import Reading
from hybrid_grpo.model.sight import check_sight

_SMALLEST_LOGP, _LARGEST_LOGP = -1e9, 1e-3
"""Bounds in nats. Log-probabilities computed in half precision may be above 0 because of rounding."""


@dataclass(frozen=True)
class Learner:
    """Properties of the policy that learns from the guests, which guests must fit."""

    config: TrainConfig
    tokenizer: Any
    prompts: Sequence[Prompt]
    ends: tuple[int, ...]
    """Tokens that end a completion."""
    vocabulary: int
    """Number of tokens that the policy knows."""
    album: ImageStore | None = None
    """The pictures of prompts."""

    @property
    def sees(self) -> bool:
        """Whether prompts have pictures."""
        return self.album is not None and not self.album.empty


class GuestFile:
    """Completions from a file, drawn again in every step."""

    def __init__(self, guest: GuestConfig, learner: Learner) -> None:
        self._guest, self._learner, self._seed = guest, learner, learner.config.run.seed
        self._by_prompt: dict[str, list[Completion]] = {}
        self._setting = f"guests.writers {guest.name}: path"
        assert guest.path is not None
        columns = DataConfig(system_prompt=learner.config.data.system_prompt)
        read = read_completions(guest.path, columns, [], setting=self._setting)
        known = {_key(prompt.text, prompt.pictures): prompt for prompt in learner.prompts}
        others = 0
        for number, group in enumerate(read):
            where = f"guests.writers {guest.name}: row {number} (from 0) of {guest.path}"
            key = self._key_of(group.prompts[0], where)
            if key in known:
                self._by_prompt.setdefault(key, []).extend(_completions(group, known[key], guest, learner, where))
            others += key not in known
        refuse(
            not self._by_prompt,
            f"{self._setting} {guest.path}: none of its {others} prompts is one of data.path: give completions of the"
            " prompts to train on, with a data.system_prompt and with the pictures if these have some",
        )
        count, having = sum(map(len, self._by_prompt.values())), len(self._by_prompt)
        self.fact = f"{count:,} completions of {having:,} of {len(known):,} prompts, from {guest.path}"
        if others:
            self.fact += f"; {others:,} rows have other prompts"

    def _key_of(self, prompt: Prompt, where: str) -> str:
        album, data = self._learner.album, self._learner.config.data
        text, values = given_pictures(prompt.text, prompt.columns.get(data.image_column))
        if not values or album is None:
            return _key(prompt.text, ())
        folder = Path(self._guest.path or "").parent
        return _key(text, [read_picture(value, folder, where, data.max_pixels) for value in values])

    def load(self, device: torch.device) -> None:
        """Does nothing, since a file has no weights to load."""

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> list[list[Completion]]:
        """Return [P], at most `per_group` completions of each prompt. Draws depend only on seed, step and prompt."""
        groups = []
        for prompt in prompts:
            found = self._by_prompt.get(_key(prompt.text, prompt.pictures), [])
            seed = stream_key(self._seed, step, prompt.epoch, prompt.id, f"guest {self._guest.name}") % 2**63
            order = np.random.default_rng(seed).permutation(len(found))
            groups.append([found[i] for i in order[: self._guest.per_group]])
        return groups


class GuestModel:
    """A frozen model that completes prompts in the same way as the policy, with its own random streams.

    On a GPU it keeps its memory for decoding, which is for `prompts` prompts at a time.
    """

    def __init__(self, guest: GuestConfig, learner: Learner, prompts: int) -> None:
        self._guest, self._learner, self._model = guest, learner, None
        assert guest.model is not None
        self._policy = replace(learner.config.policy, model=guest.model, gradient_checkpointing=False)
        self._setting, rollout = f"guests.writers {guest.name}: model", learner.config.rollout
        self.fact = f"{guest.per_group} completions of every group by {guest.model}"
        name, start = guest.model, f"{self._setting} {guest.model}"
        self._config = config = load_config(name, self._setting)
        check_architecture(config, rollout.decoder, self._setting)
        check_files(name, config, setting=self._setting)
        if learner.sees:
            check_sight(config, load_config(learner.config.policy.model), start)
        tokenizer = load_tokenizer(name, self._setting)
        refuse(
            tokenizer.get_vocab() != learner.tokenizer.get_vocab(),
            f"{start} has another tokenizer than policy.model {learner.config.policy.model}: take a guest of the same"
            " family of models, or give its completions as a file with weight baseline",
        )
        others = sorted({*stop_ids(name, tokenizer, [], config, self._setting)} - {*learner.ends})
        refuse(
            bool(others) and not rollout.ignore_eos,
            f"{start} ends completions with token {''.join(map(str, others[:1]))}, which does not end those of"
            f" policy.model: set rollout.stop_ids to {others}",
        )
        self._longest = max(len(prompt.token_ids) for prompt in learner.prompts) + rollout.max_completion_tokens
        check_lengths(config, self._longest, model=start)
        self._rows = prompts * guest.per_group
        highest = max(
            *(max(prompt.token_ids) for prompt in learner.prompts), *learner.ends, *map(int, rollout.logit_bias), 0
        )
        size = config.get_text_config().vocab_size
        refuse(
            highest >= size,
            f"{start} knows {size} tokens, and token {highest} is used: take a guest of the same family of models",
        )

    def load(self, device: torch.device) -> None:
        rollout = self._learner.config.rollout
        dtype, free = self._policy.dtype, device_bytes(device)
        self._workspace, _ = workspace_beside(rollout, self._config, dtype, self._rows, self._longest, free)
        self._model = load_model(self._policy, attention_of(rollout.decoder), self._setting).to(device).eval()
        self._sight = sight_of(self._learner.album, self._policy, device, self._setting)

    def write(self, prompts: Sequence[Prompt], step: int, beat: Callable[[], None]) -> list[list[Completion]]:
        """Return [P], `per_group` completions of each prompt, without any that have tokens unknown to the policy."""
        config, count = self._learner.config, self._guest.per_group
        seed, own = config.run.seed, f"guest {self._guest.name}"
        requests = [
            Request(p.token_ids, [stream_key(seed, step, p.epoch, p.id, k, own) for k in range(count)]) for p in prompts
        ]
        assert self._model is not None, "load() comes first"
        sampling = sampling_of(config.rollout, self._learner.ends)
        callbacks = Callbacks(on_step=beat, reading=Reading(self._sight))
        model, tokenizer = self._model, self._learner.tokenizer
        groups, _ = complete(model, tokenizer, requests, sampling, config.rollout, callbacks, self._workspace)
        # A tokenizer may have more tokens than the policy has embeddings.
        return [[c for c in group if max(c.token_ids) < self._learner.vocabulary] for group in groups]


def _key(prompt: str | list[Message], pictures: Sequence[Picture]) -> str:
    return json.dumps([prompt, *(picture.key for picture in pictures)], sort_keys=True)


def _completions(group: Rollout, prompt: Prompt, guest: GuestConfig, learner: Learner, where: str) -> list[Completion]:
    """Return a row's completions of a prompt, with tokens and log-probabilities. Raises UserError if they don't fit."""
    columns, count = group.prompts[0].columns, len(group.completions)
    ids, logp, finish = (_each(columns.get(name), count) for name in ("token_ids", "token_logp", "finish"))
    written = []
    learned, limit = guest.weight == "importance", learner.config.rollout.max_completion_tokens
    for text, token_ids, token_logp, end in zip((c.text for c in group.completions), ids, logp, finish, strict=True):
        are_tokens = _are_tokens(token_ids, text, learner)
        refuse(
            learned and not _fits(token_ids, token_logp),
            f"{where} has no token_ids and token_logp of equal length, which weight importance needs: write the file by"
            " generate --generate.token_logp true, or set weight to imitation or baseline",
        )
        refuse(
            learned and not are_tokens,
            f"{where} has token_ids that are not its completion for policy.model: set weight to baseline",
        )
        if not are_tokens:
            token_ids = _tokenized(prompt, text, end != "length", learner)
        refuse(not token_ids, f"{where} is an empty completion, and no token ends one: remove it")
        refuse(
            len(token_ids) > limit,
            f"{where} is a completion of {len(token_ids)} tokens: set rollout.max_completion_tokens {limit} to"
            f" {len(token_ids)} or higher, or remove it",
        )
        recorded = token_logp if learned else []
        written.append(Completion(token_ids, recorded, "length" if end == "length" else "stop", text))
    return written


def _each(value: Any, count: int) -> list[Any]:
    """Return a column's value for each completion of a row: `value` lists them, or belongs to the only completion."""
    if count == 1 and not (isinstance(value, list) and len(value) == 1 and isinstance(value[0], list | str)):
        return [value]
    return value if isinstance(value, list) and len(value) == count else [None] * count


def _are_tokens(ids: Any, text: str, learner: Learner) -> bool:
    if not isinstance(ids, list) or not all(type(token) is int and 0 <= token < learner.vocabulary for token in ids):
        return False
    return whole_characters(learner.tokenizer.decode(ids, skip_special_tokens=True)) == whole_characters(text)


def _fits(ids: Any, logp: Any) -> bool:
    are_alike = isinstance(ids, list) and isinstance(logp, list) and len(ids) == len(logp) > 0
    return are_alike and all(isinstance(x, float | int) and _SMALLEST_LOGP < x <= _LARGEST_LOGP for x in logp)


def _tokenized(prompt: Prompt, text: str, ends: bool, learner: Learner) -> list[int]:
    """Return the tokens of a text, with one end token at the end if it `ends`."""
    if not (ends and learner.ends):
        return list(learner.tokenizer(text, add_special_tokens=False)["input_ids"])
    end = end_of(prompt, learner.config.data, learner.tokenizer, learner.ends)
    own = learner.ends[0] if end is None or end not in learner.ends else end
    return ended_ids(learner.tokenizer, text, own, learner.ends)
