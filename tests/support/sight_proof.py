"""Proof that pictures are seen, decoded and trained on as transformers computes it: a tiny random model of a family.

The policy's side goes the way of `Policy` without its engine, as in architecture_proof.py: prompts are read by the
model's processor into visual tokens, the tower runs once for each picture, a view is decoded page by page, and the
packed pass with shared prompts gives log-probabilities and gradients. Every other completion gets an answer with
pictures between two turns. The other side is transformers alone, with the same pictures: `generate()`, and one plain
forward for each completion.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from architecture_proof import CPU, LIMIT, Gaps, gradient_gap, gradients, plain_pass, policy_pass
from PIL import Image
from seeing import make_seeing, pictures
from torch import Tensor

from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.data.completion import Completion
from hybrid_grpo.data.packing import pack
from hybrid_grpo.data.pictures import ImageStore
from hybrid_grpo.generation import GREEDY, Callbacks, Request, Sampling, stream_key
from hybrid_grpo.generation.rollout import complete
from hybrid_grpo.generation.sequence import Finish
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.gathered_weights import View, meta_copy
from hybrid_grpo.model.loading import load_config, load_model
from hybrid_grpo.model.reading import Reading
from hybrid_grpo.model.sight import VisionEncoder, image_token, load_tower

ONE, WIDE, HIGH, LARGE = pictures()
PROMPTS: list[list[Any]] = [
    [ONE, "What?"],
    ["Hello."],
    ["ab", WIDE, "cd", HIGH, "Which one is higher?"],
    [LARGE, ONE, "a", ONE, WIDE, "b"],
    ["Only text between the others."],
    [WIDE, WIDE, "Same?"],
]
"""Prompts of texts and pictures: of none to four pictures of several sizes, of which some are there twice."""
ANSWER: list[Any] = ["See:", LARGE, "and", ONE, "Now?"]
TURN = 5
"""Tokens of a first turn that is answered."""


class Seen:
    """A prompt, or an answer after one, as each side reads it."""

    def __init__(self, parts: list[Any], number: int, processor: Any, album: ImageStore) -> None:
        shown = [part for part in parts if isinstance(part, Image.Image)]
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        tokenizer = processor.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

        text = text.removeprefix(tokenizer.bos_token) if number < 0 else text

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self.ids = album.ids(text, album.read(shown, None, f"row {number}", DataConfig()), encode, f"row {number}")
        self._text, self._shown, self._processor = text, shown, processor
        self.given = self.read(text, shown)
        self.length = self.given["input_ids"].shape[1]

    def read(self, text: str, shown: list[Image.Image]) -> dict[str, Any]:
        options = {"return_tensors": "pt", "add_special_tokens": False}
        return dict(self._processor(text=[text], images=shown or None, **options))

    def with_completion(self, completion: Completion, answer: Seen | None) -> dict[str, Any]:
        """Return what transformers takes of the prompt and a completion, with this answer after its first turn, or
        without one."""
        cut = completion.observations[0][0] if completion.observations else len(completion.token_ids)
        turns = [_text_of(completion.token_ids[:cut])]
        given = dict(self.given)
        if completion.observations:
            assert answer is not None
            turns += [answer.given, _text_of(completion.token_ids[cut:])]
            # Pixels of all pictures, in order.
            given = self.read(self._text + answer._text, self._shown + answer._shown)
        for name in ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids"):
            if name in given:
                given[name] = torch.cat([part[name].to(given[name].dtype) for part in (self.given, *turns)], dim=1)
        return given


def _text_of(tokens: list[int]) -> dict[str, Tensor]:
    ids = torch.tensor([tokens], dtype=torch.int64)
    kinds = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), torch.zeros_like(ids))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), **kinds}


class _Answers:
    """Answers the first turn of every other completion; implements the decoder's `Turns`."""

    begins_sequences = is_open = False

    def __init__(self, answer: list[int]) -> None:
        self._answer, self._keys, self._waiting = answer, set[int](), list[int]()

    def begin(self, requests: list[Request]) -> None:
        self._keys = {key for request in requests for key in request.keys[::2]}

    def ended(self, key: int, turn_ids: list[int], room: int) -> Finish | None:
        return "stop"

    def cut(self, key: int) -> Finish | None:
        if key not in self._keys:
            return "length"
        self._keys.remove(key)
        self._waiting.append(key)
        return None

    def answers(self, patience_s: float) -> list[tuple[int, list[int] | Finish]]:
        waiting, self._waiting = self._waiting, []
        return [(key, self._answer) for key in waiting]

    def finished(self, key: int, completion: Completion) -> Completion:
        return completion


def prove_sight(name: str, folder: Path) -> tuple[Gaps, VisionEncoder]:
    """Return the gaps of a family, and what saw its pictures. Some completions get an answer."""
    gaps, sight, *_ = _proven(name, folder, answers=True)
    return gaps, sight


def prove_rounding(name: str, folder: Path) -> tuple[Gaps, float]:
    """Return the gaps of a family without answers, of which that of gradients is measured from transformers' gradients
    in float64; and how far from these are transformers' own in float32."""
    gaps, _, plain, rows, mine, theirs = _proven(name, folder, answers=False)
    plain.zero_grad()
    plain_pass(_scores(plain.double(), prompt, completion, None) for prompt, completion in rows)
    exact = dict(gradients(plain))
    gradient, worst, without = gradient_gap(mine, exact)
    return replace(gaps, gradient=gradient, worst=worst, without=without), gradient_gap(theirs, exact)[0]


def _proven(
    name: str, folder: Path, *, answers: bool
) -> tuple[Gaps, VisionEncoder, Any, list[tuple[Seen, Completion]], dict[str, Tensor], dict[str, Tensor]]:
    """Return the gaps, what saw the pictures, transformers' model, the sampled rows, and both sides' gradients."""
    processor = make_seeing(name, folder)
    config, policy_config = load_config(str(folder)), PolicyConfig(model=str(folder), dtype="float32")
    plain: Any = tf.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    policy = load_model(policy_config, ATTENTION)
    of_text = {name for name, _ in policy.named_parameters()}
    for name, weight in plain.named_parameters():
        weight.requires_grad_(name in of_text)
    album = ImageStore(lambda: processor, image_token(config))
    sight = VisionEncoder(load_tower(policy_config), album.pixels, CPU, 1 << 28)
    prompts = [Seen(parts, number, processor, album) for number, parts in enumerate(PROMPTS)]
    answer, placeholder = Seen(ANSWER, -1, processor, album), image_token(config)
    turns = _Answers(answer.ids) if answers else None
    rows, tokens, decoded = _decoding(plain, policy, sight, prompts, answer, turns, placeholder)
    expected = plain_pass(_scores(plain, prompt, completion, answer) for prompt, completion in rows)
    read = [
        part for row, (prompt, completion) in enumerate(rows) for part in completion.token_rows(row, list(prompt.ids))
    ]
    found, mine = policy_pass(policy, pack(read, 500, CPU, share="on", reading=Reading(sight)))
    theirs = {name: gradient.clone() for name, gradient in gradients(plain)}
    packed = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    gradient, worst, without = gradient_gap(mine, theirs)
    return Gaps(tokens, decoded, packed, gradient, worst, without), sight, plain, rows, mine, theirs


def _decoding(
    plain: Any, policy: Any, sight: VisionEncoder, prompts: list[Seen], answer: Seen, answers: _Answers | None,
    placeholder: int,
) -> tuple[list[tuple[Seen, Completion]], int, float]:  # fmt: skip
    view = View(policy, meta_copy(policy, policy.config._attn_implementation).eval(), False, CPU)
    view.gather()
    config = RolloutConfig(max_slots=5, prefill_tokens=20)
    different, gap, rows = 0, 0.0, []
    for samples, temperature in ((2, GREEDY), (3, 1.3)):
        turns = None if temperature == GREEDY else answers
        requests = [
            Request(
                p.ids, [stream_key(1, 0, 0, i, k) for k in range(samples)], max_total_tokens=1000 if turns else None
            )
            for i, p in enumerate(prompts)
        ]
        sampling = Sampling(LIMIT, temperature=temperature, max_turn_tokens=TURN if turns else sys.maxsize)
        tokenizer = _NoText(policy.config.get_text_config().vocab_size)
        callbacks = Callbacks(turns=turns, reading=Reading(sight))
        groups, _ = complete(view.module, tokenizer, requests, sampling, config, callbacks)
        for prompt, group in zip(prompts, groups, strict=True):
            if temperature == GREEDY:
                options = {"max_new_tokens": LIMIT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                with torch.no_grad():
                    expected = plain.generate(**prompt.given, **options)[0, prompt.length :].tolist()
                different += sum(a != b for c in group for a, b in zip(c.token_ids, expected, strict=True))
            # transformers takes a sampled token of this kind for a picture.
            kept = [c for c in group if placeholder not in c.token_ids]
            rows += [(prompt, c) for c in kept if temperature != GREEDY]
            for c in kept:
                with torch.no_grad():
                    logp = _scores(plain, prompt, c, answer, temperature or 1.0)[0]
                gap = max(gap, float((torch.tensor(c.logp) - logp).abs().max()))
    return rows, different, gap


class _NoText:
    """A tokenizer in which every id is a token without text."""

    def __init__(self, size: int) -> None:
        self._size = size

    def __len__(self) -> int:
        return self._size

    def get_vocab(self) -> dict[str, int]:
        return {str(token): token for token in range(self._size)}

    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def _scores(
    plain: Any, prompt: Seen, completion: Completion, answer: Seen | None, temperature: float = 1.0
) -> tuple[Tensor, Tensor]:
    given = prompt.with_completion(completion, answer)
    places = completion.sampled_places
    logits = plain(**given, use_cache=False).logits[0, [prompt.length - 1 + place for place in places]]
    logp_TV = (logits / temperature).log_softmax(-1)
    token_T1 = torch.tensor(completion.token_ids)[:, None]
    return logp_TV.gather(1, token_T1)[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)
