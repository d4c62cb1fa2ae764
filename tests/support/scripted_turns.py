"""Turns whose answers are drawn, and what their tokens should have been."""

import random
from collections import Counter
from dataclasses import replace

import torch
from tiny_models import VOCABULARY


class Scripted:
    """Answers that are a function of the turn alone, and come when they like."""

    begins_sequences = is_open = False

    def __init__(self, turns, delays=(0,), longest=9):
        self.turns, self.longest = turns, longest
        self.delays = iter(random.Random(0).choices(delays, k=10_000))
        self.under_way = {}
        self.count = Counter()

    def begin(self, requests):
        assert not self.under_way, "of another call"

    def ended(self, key, turn_ids, room):
        assert key not in self.under_way, "one answer at a time"
        self.count[key] += 1
        if room <= 0:
            return "length"
        if self.count[key] == self.turns:
            return "stop"
        rng = random.Random(hash((key, *turn_ids)))
        given = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, self.longest))]
        self.under_way[key] = [next(self.delays), "stop" if rng.random() < 0.05 else given]
        return None

    def cut(self, key):
        return "length"

    def answers(self, patience_s):
        if patience_s and self.under_way:
            next(iter(self.under_way.values()))[0] = 0
        for waiting in self.under_way.values():
            waiting[0] -= 1
        ready = [key for key, (delay, _) in self.under_way.items() if delay < 0]
        return [(key, self.under_way.pop(key)[1]) for key in ready]

    def finished(self, key, completion):
        return replace(completion, messages=({"role": "assistant", "content": str(key)},))


def logp_of_training(model, prompt, completion, temperature=1.0):
    """Log-probabilities of the sampled tokens by one forward over everything that was read."""
    sequence = torch.tensor([prompt + completion.read_ids])
    with torch.no_grad():
        logp = (model(sequence, use_cache=False).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    places = completion.sampled_places
    return [float(logp[place, token]) for place, token in zip(places, completion.token_ids, strict=True)]
