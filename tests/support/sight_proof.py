"""Proof that pictures are seen, decoded and trained on as transformers computes it: a tiny random model of a family.

The policy's side goes the way of `Policy` without its engine, as in architecture_proof.py: prompts are read by the
model's processor into visual tokens, the tower runs once for each picture, a view is decoded page by page, and the
packed pass with shared prompts gives log-probabilities and gradients. The other side is transformers alone, with the
same pictures: `generate()`, and one plain forward for each completion.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers as tf
from architecture_proof import CPU, LIMIT, Gaps, gradient_gap, gradients, weights_of
from PIL import Image
from seeing import make_seeing, pictures
from torch import Tensor

from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig
from hybrid_grpo.data.packing import pack
from hybrid_grpo.data.pictures import Album
from hybrid_grpo.generation import GREEDY, Request, Sampling, stream_key
from hybrid_grpo.generation.rollout import complete
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.loading import load_config, load_model
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.processors import load_tower
from hybrid_grpo.model.sight import Sight, image_token
from hybrid_grpo.model.trained_sight import TrainedSight
from hybrid_grpo.model.view import View, meta_copy

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


class Seen:
    """A prompt as each side reads it."""

    def __init__(self, parts: list[Any], number: int, processor: Any, album: Album) -> None:
        shown = [part for part in parts if isinstance(part, Image.Image)]
        content = [{"type": "text", "text": p} if isinstance(p, str) else {"type": "image"} for p in parts]
        tokenizer = processor.tokenizer
        text = tokenizer.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True, tokenize=False
        )

        def encode(text: str) -> list[int]:
            return list(tokenizer(text, add_special_tokens=False)["input_ids"])

        self.ids = album.ids(text, album.read(shown, None, f"row {number}", DataConfig()), encode, f"row {number}")
        options = {"return_tensors": "pt", "add_special_tokens": False}
        self.given = dict(processor(text=[text], images=shown or None, **options))
        self.length = self.given["input_ids"].shape[1]

    def with_completion(self, completion: list[int]) -> dict[str, Any]:
        """Return what transformers takes of the prompt and a completion."""
        new = torch.tensor([completion], dtype=torch.int64)
        given = dict(self.given)
        of_text = {"input_ids": new, "attention_mask": torch.ones_like(new)}
        for name in (*of_text, "mm_token_type_ids", "token_type_ids"):
            if name in given:
                more = of_text.get(name, torch.zeros_like(new))
                given[name] = torch.cat([given[name], more.to(given[name].dtype)], dim=1)
        return given


def prove_sight(name: str, folder: Path, *, trained: bool = False, prefill_tokens: int = 20) -> tuple[Gaps, Sight]:
    """Return the gaps of a family, whose tower is `trained` too or not, and what saw its pictures."""
    processor = make_seeing(name, folder)
    config, policy_config = load_config(str(folder)), PolicyConfig(model=str(folder), dtype="float32")
    plain: Any = tf.AutoModelForImageTextToText.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32
    ).eval()
    policy = load_model(policy_config, ATTENTION)
    album = Album(lambda: processor, image_token(config))
    given = load_tower(policy_config), album.pixels
    trained_sight = TrainedSight(*given, 1 << 28, album.blank, None, 0) if trained else None
    sight = trained_sight or Sight(*given, CPU, 1 << 28)
    prompts = [Seen(parts, number, processor, album) for number, parts in enumerate(PROMPTS)]
    placeholder = image_token(config)
    rows, tokens, decoded = _decoding(plain, policy, sight, prompts, placeholder, prefill_tokens)
    expected = []
    for row, (prompt, completion) in enumerate(rows):
        scores = torch.stack(_scores(plain, prompt, completion))
        (scores * weights_of(len(completion), row)).sum().backward()
        expected.append(scores[0].detach())
    found, mine = _policy_pass(policy, sight, rows)
    if trained_sight is not None:
        of_tower = zip(trained_sight.state(), trained_sight.gradients(), strict=True)
        mine |= {name: gradient for name, gradient in of_tower if gradient.any()}
    theirs = {name: of for name, of in gradients(plain) if trained or name in dict(policy.named_parameters())}
    packed = max(float((a - b).abs().max()) for a, b in zip(found, expected, strict=True))
    gradient, worst, without = gradient_gap(mine, theirs)
    return Gaps(tokens, decoded, packed, gradient, worst, without), sight


def _decoding(
    plain: Any, policy: Any, sight: Sight, prompts: list[Seen], placeholder: int, prefill_tokens: int
) -> tuple[list[tuple[Seen, list[int]]], int, float]:
    view = View(policy, meta_copy(policy, policy.config._attn_implementation).eval(), False, CPU)
    view.gather()
    config = RolloutConfig(max_slots=5, prefill_tokens=prefill_tokens)
    different, gap, rows = 0, 0.0, []
    for samples, temperature in ((2, GREEDY), (3, 1.3)):
        requests = [Request(p.ids, [stream_key(1, 0, 0, i, k) for k in range(samples)]) for i, p in enumerate(prompts)]
        given = Sampling(LIMIT, temperature=temperature), config
        groups, _ = complete(view.module, _NoText(), requests, *given, sight=sight)
        for prompt, group in zip(prompts, groups, strict=True):
            if temperature == GREEDY:
                options = {"max_new_tokens": LIMIT, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
                with torch.no_grad():
                    expected = plain.generate(**prompt.given, **options)[0, prompt.length :].tolist()
                different += sum(a != b for c in group for a, b in zip(c.token_ids, expected, strict=True))
            # transformers takes a sampled token of this kind for a picture.
            kept = [c for c in group if placeholder not in c.token_ids]
            rows += [(prompt, c.token_ids) for c in kept if temperature != GREEDY]
            for c in kept:
                with torch.no_grad():
                    logp = _scores(plain, prompt, c.token_ids, temperature or 1.0)[0]
                gap = max(gap, float((torch.tensor(c.logp) - logp).abs().max()))
    return rows, different, gap


class _NoText:
    def decode(self, *_: Any, **__: Any) -> str:
        return ""


def _scores(plain: Any, prompt: Seen, completion: list[int], temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    given = prompt.with_completion(completion)
    logits = plain(**given, use_cache=False).logits[0, prompt.length - 1 : -1]
    logp_TV = (logits.float() / temperature).log_softmax(-1)
    return logp_TV.gather(1, torch.tensor(completion)[:, None])[:, 0], -(logp_TV.exp() * logp_TV).sum(-1)


def _policy_pass(
    policy: Any, sight: Sight, rows: list[tuple[Seen, list[int]]]
) -> tuple[list[Tensor], dict[str, Tensor]]:
    model, logp = LogprobModel(policy).train(), [torch.zeros(0)] * len(rows)
    prompts, completions = [list(prompt.ids) for prompt, _ in rows], [completion for _, completion in rows]
    for micro in partial(pack, share="on")(prompts, completions, range(len(rows)), 400, CPU, sight=sight):
        scores = torch.stack(model(*micro.inputs, 1.0))
        lengths = [len(completions[row]) for row in micro.rows]
        weights = torch.cat([weights_of(n, row) for n, row in zip(lengths, micro.rows, strict=True)], dim=1)
        (scores * weights).sum().backward()
        for row, values in zip(micro.rows, scores[0].detach().split(lengths), strict=True):
            logp[row] = values
    return logp, dict(gradients(policy))
