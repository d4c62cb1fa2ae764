"""Process rewards whose steps are texts: finds the token of the completion at which each step ends."""

from itertools import accumulate
from typing import Any

from hybrid_grpo.data.batch import Completion, RewardStep
from hybrid_grpo.rewards.functions import TextStep

_UNFINISHED = "\ufffd"
"""The character to which tokenizers decode the tokens of an incomplete character."""


class TokenEnds:
    """Finds the end of each token within a text."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        # Decoders drop a leading space, so all but the first tokens are decoded after this one.
        self._anchor = list(tokenizer("a", add_special_tokens=False)["input_ids"])
        self._texts: dict[tuple[bool, tuple[int, ...]], str] = {}

    def __call__(self, token_ids: list[int], text: str) -> list[int]:
        """Return [T]: for each token, the number of characters of `text` (the decoded tokens) up to the token's end.
        Special tokens have no characters. A character that consists of several tokens belongs to the last of them."""
        lengths: list[int] = []
        run: list[int] = []
        for number, token in enumerate(token_ids, 1):
            run.append(token)
            decoded = self._text(len(run) == number, tuple(run))
            # A character has at most four bytes, and so four tokens.
            finished = not decoded.endswith(_UNFINISHED) or len(run) == 4
            lengths.append(len(decoded) if finished else 0)
            run = [] if finished else run
        ends = list(accumulate(lengths))
        if ends[-1:] == [len(text)]:
            return ends
        # The texts of tokens do not add up to the text: decode every prefix.
        return [min(len(self._decode(token_ids[: k + 1])), len(text)) for k in range(len(token_ids))]

    def _text(self, first: bool, token_ids: tuple[int, ...]) -> str:
        """Decode tokens that begin a completion (`first`) or that follow other tokens."""
        if (first, token_ids) not in self._texts:
            anchor = [] if first else self._anchor
            self._texts[first, token_ids] = self._decode([*anchor, *token_ids])[len(self._decode(anchor)) :]
        return self._texts[first, token_ids]

    def _decode(self, token_ids: list[int]) -> str:
        # Tokens missing from saved rollouts are -1.
        return str(self._tokenizer.decode([t for t in token_ids if t >= 0], skip_special_tokens=True))


def token_steps(text_steps: list[TextStep], completion: Completion, token_ends: TokenEnds | None) -> list[RewardStep]:
    """Return the end (in tokens) and the reward of each step. A step ends with the token that has its last character.
    Rewards of steps that end with the same token are added up, and an empty step ends where the previous step does. If
    `token_ends` is None, all steps end with the completion. Raises ValueError if the texts do not follow each other
    from the beginning of the completion."""
    text, at = completion.text, 0
    rewards: dict[int, float] = {}
    before = completion.observations[-1][0] if completion.observations else 0  # the text contains the last turn only
    ends = [] if token_ends is None else token_ends(completion.token_ids[before:], text)
    token = 0
    for step_text, reward in text_steps:
        if not text.startswith(step_text, at):
            raise ValueError(f"step {step_text!r:.40} does not stand at character {at} of the completion")
        at += len(step_text)
        while token < len(ends) - 1 and ends[token] < at:
            token += 1
        end = before + token + 1 if ends else len(completion.token_ids)
        rewards[end] = rewards.get(end, 0.0) + reward
    return sorted(rewards.items())
