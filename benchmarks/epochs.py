"""How much of an epoch's completions the next epoch repeats if both draw with the same noise: what drafts could gain.

    python benchmarks/epochs.py --json benchmarks/results/epochs.json [--model FOLDER]

A small model (that of drafts.py, trained once, into FOLDER) completes prompts of attempts to reach a number. A second
policy is made from it by a step of policy gradients with random advantages, of the size that a given KL a token asks
for, and completes the same prompts. Reported for every KL and three ways of drawing, `gumbel` (the largest of logits
plus Gumbel noise) and `cumulative` (the inverse of the cumulative distribution, as rollouts draw), both with the
noise of the epoch before, and `other`, which is `cumulative` with other noise, as rollouts are:

    agree      share of tokens that both draw after the same text
    prefix     mean number of tokens until the completions first differ, of `length`
    per_step   tokens a forward of the second policy gives, if the first one's completion is the draft: up to `MOST` at
               a time, and after a difference from where the last three tokens occur in it next
    siblings   the same with drafts from the completions of the second policy itself, which share the prompt and are as
               long so far; `both` takes the longer of the two drafts' agreements
    last, near, longest   the same with one draft: that of the first one's completion if it has the same last tokens at
               the same place, else what followed them where they occurred last (as in rollouts), nearest in the first
               one's completion, or behind the most tokens alike, in all completions of the prompt
"""

from __future__ import annotations

import argparse
import json
import random
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from drafts import countdown, trained
from torch import Tensor
from transformers import AutoModelForCausalLM

KLS = (1e-4, 1e-3, 1e-2)
PROMPTS, SAMPLES, PROMPT, MOST, SUFFIX = 12, 4, 40, 16, 3
CHOICES = ("last", "near", "longest")


def draw(logits_nV: Tensor, way: str, at: int, seed: int) -> Tensor:
    """Choose a token for each row by the noise of position `at`."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + at)
    if way == "gumbel":
        uniform = torch.rand(logits_nV.shape, generator=generator, dtype=torch.float64).clamp(1e-300)
        return (logits_nV.double() - (-uniform.log()).log()).argmax(-1)
    uniform = torch.rand(len(logits_nV), 1, generator=generator, dtype=torch.float64)
    return torch.searchsorted(logits_nV.double().softmax(-1).cumsum(-1), uniform)[:, 0].clamp(
        max=logits_nV.shape[1] - 1
    )


@torch.no_grad()
def completions(model: Any, prompts_nP: Tensor, length: int, way: str, seed: int) -> Tensor:
    """Return completions, [n, length]."""
    found, ids, cache = [], prompts_nP, None
    for at in range(length):
        out = model(ids, past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        ids = draw(out.logits[:, -1], way, at, seed)[:, None]
        found.append(ids)
    return torch.cat(found, 1)


@torch.no_grad()
def logits_of(model: Any, prompts_nP: Tensor, text_nL: Tensor) -> Tensor:
    """Return logits before each token of a text, [n, L, V]."""
    return model(torch.cat([prompts_nP, text_nL], 1)).logits[:, prompts_nP.shape[1] - 1 : -1]


def kl(model: Any, other: Any, prompts_nP: Tensor, text_nL: Tensor) -> float:
    """Return the KL divergence of `other` from `model` a token, in nats."""
    p, q = (logits_of(m, prompts_nP, text_nL).log_softmax(-1) for m in (model, other))
    return float((p.exp() * (p - q)).sum(-1).mean())


def changed(model: Any, prompts_nP: Tensor, text_nL: Tensor, target: float, seed: int = 3) -> Any:
    """Return a policy with this KL from `model`, along the sign of a policy gradient with random advantages."""
    advantage_n = torch.randn(len(text_nL), generator=torch.Generator().manual_seed(seed))
    logits = model(torch.cat([prompts_nP, text_nL], 1)).logits[:, prompts_nP.shape[1] - 1 : -1]
    logp_nL = logits.log_softmax(-1).gather(-1, text_nL[..., None])[..., 0]
    model.zero_grad()
    (-(advantage_n[:, None] * logp_nL).mean()).backward()
    signs = [parameter.grad.sign() for parameter in model.parameters()]
    other = type(model)(model.config).eval()
    low, high = 0.0, 1e-1
    for _ in range(25):
        size = (low + high) / 2
        with torch.no_grad():
            for mine, theirs, sign in zip(other.parameters(), model.parameters(), signs, strict=True):
                mine.copy_(theirs - size * sign)
        low, high = (size, high) if kl(model, other, prompts_nP, text_nL) < target else (low, size)
    return other


def forwards(text: list[int], draft_at: Callable[[int], list[list[int]]]) -> int:
    """Return the number of forwards that a text takes, if `draft_at` proposes what may follow its first tokens."""
    at = steps = 0
    while at < len(text):
        best = 0
        for draft in draft_at(at):
            held = 0
            while held < min(len(draft), MOST) and at + held < len(text) and draft[held] == text[at + held]:
                held += 1
            best = max(best, held)
        at, steps = at + best + 1, steps + 1
    return steps


def behind(suffix: list[int], text: list[int], near: int) -> list[int]:
    """Return what follows `suffix` in `text` where it occurs next to `near`; nothing if it does not occur."""
    ends = [i for i in range(len(suffix), len(text)) if text[i - len(suffix) : i] == suffix]
    return text[min(ends, key=lambda end: abs(end - near)) :][:MOST] if suffix and ends else []


class Text:
    """Tokens, and where each `SUFFIX` of them occur."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens, self.ends = tokens, defaultdict[tuple[int, ...], list[int]](list)
        for end in range(SUFFIX, len(tokens)):
            self.ends[tuple(tokens[end - SUFFIX : end])].append(end)


def one_draft(choice: str, text: list[int], at: int, old: Text, texts: list[tuple[Text, int]]) -> list[int]:
    """Return what follows the last tokens of text[:at] in `old` at the same place, if it has them there, else at the
    place that is chosen in `texts`, each of which is known up to a length."""
    suffix = text[max(0, at - SUFFIX) : at]
    if old.tokens[max(0, at - SUFFIX) : at] == suffix:
        return old.tokens[at : at + MOST]

    def worth(number: int, end: int) -> tuple[int, int]:
        if choice == "near":
            return texts[number][0] is old, -abs(end - at)
        other, alike, most = texts[number][0].tokens, SUFFIX, min(32, end, at) if choice == "longest" else 0
        while alike < most and other[end - 1 - alike] == text[at - 1 - alike]:
            alike += 1
        return alike, number

    ends = (
        (n, end) for n, (other, known) in enumerate(texts) for end in other.ends.get(tuple(suffix), []) if end < known
    )
    *_, number, end = max(((*worth(n, end), n, end) for n, end in ends), default=(0, MOST**9))
    return texts[number][0].tokens[end : min(end + MOST, texts[number][1])]


def gains(first: list[list[int]], second: list[list[int]]) -> dict[str, float]:
    """Return tokens a forward by kind of draft."""
    steps = dict.fromkeys(("per_step", "siblings", "both", *CHOICES), 0)
    olds, news = list(map(Text, first)), list(map(Text, second))
    for row, text in enumerate(second):
        group = [r for r in range(len(second)) if r // SAMPLES == row // SAMPLES]

        def of_epoch(at: int, text: list[int] = text, old: list[int] = first[row]) -> list[list[int]]:
            if old[max(0, at - SUFFIX) : at] == text[max(0, at - SUFFIX) : at]:
                return [old[at : at + MOST]]
            return [behind(text[max(0, at - SUFFIX) : at], old, at)]

        def of_siblings(at: int, text: list[int] = text, group: list[int] = group) -> list[list[int]]:
            return [behind(text[max(0, at - SUFFIX) : at], second[r][:at], at) for r in group]

        steps["per_step"] += forwards(text, of_epoch)
        steps["siblings"] += forwards(text, of_siblings)
        steps["both"] += forwards(text, lambda at, a=of_epoch, b=of_siblings: [*a(at), *b(at)])
        for choice in CHOICES:

            def chosen(at: int, choice: str = choice, text: list[int] = text, row: int = row) -> list[list[int]]:
                texts = [(olds[r], len(first[r])) for r in group]  # noqa: B023
                texts += [(news[r], at) for r in (*(r for r in group if r != row), row)]  # noqa: B023
                return [one_draft(choice, text, at, olds[row], texts)]

            steps[choice] += forwards(text, chosen)
    return {kind: sum(map(len, second)) / count for kind, count in steps.items()}


def measure(model: Any, length: int) -> list[dict[str, Any]]:
    rng = random.Random(1)
    prompts_nP = torch.tensor([countdown(rng, PROMPT) for _ in range(PROMPTS) for _ in range(SAMPLES)])
    prompts_nP = prompts_nP.view(PROMPTS, SAMPLES, -1)[:, :1].expand(-1, SAMPLES, -1).flatten(0, 1)
    found = []
    texts = {way: completions(model, prompts_nP, length, way, 7) for way in ("gumbel", "cumulative")}
    texts["other"] = texts["cumulative"]
    entropy = torch.distributions.Categorical(logits=logits_of(model, prompts_nP, texts["gumbel"])).entropy().mean()
    print(f"entropy {entropy:.3f} nats a token", flush=True)
    for target in KLS:
        other = changed(model, prompts_nP, texts["gumbel"], target)
        for way, first in texts.items():
            logits, seed = logits_of(other, prompts_nP, first), 8 if way == "other" else 7
            again = torch.stack([draw(logits[:, at], way, at, seed) for at in range(length)], 1)
            second = completions(other, prompts_nP, length, way, seed)
            same = (first == second).long().cumprod(1).sum(1).float().mean()
            agree = (again == first).float().mean()
            row = {"kl": target, "way": way, "agree": agree.item(), "prefix": same.item(), "length": length}
            row |= gains(first.tolist(), second.tolist()) | {"entropy": entropy.item()}
            found.append({name: value if isinstance(value, str) else round(value, 4) for name, value in row.items()})
            print(json.dumps(found[-1]), flush=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--model", type=Path, default=Path("runs/drafts-model"))
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--length", type=int, default=512)
    args = parser.parse_args()
    if not (args.model / "config.json").exists():
        trained(args.model, args.steps)
    found = measure(AutoModelForCausalLM.from_pretrained(args.model, dtype=torch.float32).eval(), args.length)
    if args.json:
        args.json.write_text(json.dumps(found, indent=2) + "\n")


if __name__ == "__main__":
    main()
