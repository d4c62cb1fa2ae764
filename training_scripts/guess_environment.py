"""A game for several turns: a hidden letter is to be guessed, and every wrong guess is told on which side it is."""

import random

LETTERS = "abcdefghijklmno"
"""What may be guessed: halving finds each of the 15 in at most 4 guesses."""
HIDDEN = LETTERS[1:-1]
"""What may be hidden. There is more than one way to find all of these in 4 guesses."""


class GuessALetter:
    """Every turn of the model is a guess. The reward of the right one is 1; one that is no letter ends the game.

    White space beside a letter is no guess either: a policy that is rewarded for entropy would spend it there.
    """

    def reset(self, **columns: object) -> None:
        """Hide a letter. `random` is seeded before, alike for all completions of a prompt."""
        self.letter = random.choice(HIDDEN)
        self.guesses: list[str] = []

    def step(self, text: str) -> tuple[str, float, bool]:
        self.guesses.append(text)
        if text == self.letter:
            return "right", 1.0, True
        if text not in LETTERS or len(text) != 1:
            return "", 0.0, True  # else a model may come to say nothing, which would only cost a guess
        return ("later" if text < self.letter else "earlier"), 0.0, False
