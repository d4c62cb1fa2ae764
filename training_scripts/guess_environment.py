"""A game of several turns: guess a hidden letter. A wrong guess is answered by the side on which the letter is."""

import random

LETTERS = "abcdefghijklmno"
"""The letters that may be guessed. Bisection finds each of the 15 in at most 4 guesses."""
HIDDEN = LETTERS[1:-1]
"""The letters that may be hidden. There is more than one way to find all of them in 4 guesses."""


class GuessALetter:
    """Every turn of the model is a guess. The right one has reward 1; one that is not a letter ends the game.

    A letter with white space is not a guess either: a policy with an entropy bonus would spend its entropy there.
    """

    def reset(self, **columns: object) -> None:
        """Hide a letter. `random` has been seeded, equally for all completions of a prompt."""
        self.letter = random.choice(HIDDEN)
        self.guesses: list[str] = []

    def step(self, text: str) -> tuple[str, float, bool]:
        self.guesses.append(text)
        if text == self.letter:
            return "right", 1.0, True
        if text not in LETTERS or len(text) != 1:
            return "", 0.0, True  # otherwise a model may learn to say nothing, which would only cost a guess
        return ("later" if text < self.letter else "earlier"), 0.0, False
