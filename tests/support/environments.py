"""Environments for tests: in the form of TRL's documentation, with steps, and such as go wrong."""

import os
import random
import time


class Counter:
    """A counter that the model increments."""

    def reset(self, **kwargs) -> str | None:
        self.counter = 0
        return None

    def increment(self, step: int) -> int:
        """
        Increment the counter.

        Args:
            step: by how much.

        Returns:
            The counter.
        """
        self.counter += step
        return self.counter


def counted(environments, **kwargs) -> list[float]:
    """The value of the counter, as TRL's examples have it."""
    return [environment.counter for environment in environments]


class Echo:
    """Gives back what it is told, and keeps the reward in an attribute."""

    def __init__(self):
        self.reward = 0.0
        self._lock = open(os.devnull)  # noqa: SIM115  # what cannot be pickled

    async def reset(self, prompt, **kwargs) -> str:
        self.reward = 0.0
        return f" [{prompt[-1]['content'][:3]}]"

    async def echo(self, message: str) -> str:
        """
        Say something.

        Args:
            message: what is said.

        Returns:
            The same.
        """
        self.reward += len(message)
        return message


def reward_func(completions, environments, **kwargs):
    return [environment.reward for environment in environments]


def locks(environments, **kwargs):
    return [float(environment._lock.fileno()) for environment in environments]


class Wordle:
    """A game by a tool, with its reward and its end in attributes."""

    def reset(self, **kwargs) -> str:
        self.secret, self.reward, self.done = random.choice(["cab"]), 0.0, False
        return " Guess three letters."

    def guess(self, word: str) -> str:
        """
        Guess the word.

        Args:
            word: three letters.

        Returns:
            For each letter G (in its place) or X.
        """
        if self.done:
            raise ValueError("Game over.")
        self.reward = float(word == self.secret)
        self.done = word == self.secret
        return "".join("G" if mine == theirs else "X" for mine, theirs in zip(word, self.secret, strict=False))


class Owner:
    """Owns its reward; its `step` is a tool."""

    def reset(self, goal, **kwargs):
        self.goal, self.at = goal, 0

    def step(self, by: int) -> str:
        """
        Go on.

        Args:
            by: how far.
        """
        self.at += by
        return f"at {self.at}"

    async def get_reward(self) -> float:
        return float(self.at == self.goal)


class Steps:
    """Every turn is a step: rewards its length, ends with a turn `bye`."""

    def reset(self):
        self.seen = []

    def step(self, text):
        self.seen.append(text)
        return f"{len(self.seen)}!", float(len(text)), text == "bye"


class Draws:
    """Says in which process it is, and a number that is drawn by chance."""

    def reset(self, how=""):
        if how == "reset":
            raise ValueError("no reset")
        return f"{os.getpid()} {random.random()}" if how == "process" else f"{random.random()}"

    def step(self, text):
        return f"{os.getpid()} {random.random()}", 1.0, text == "bye"


class Closes:
    """Earns its reward, and hangs or exits when it is closed."""

    def reset(self, how="") -> None:
        self.how = how

    def step(self, text):
        return "", 2.0, True

    def close(self):
        if self.how == "hang":
            time.sleep(600)
        if self.how == "exit":
            os._exit(5)
        raise SystemExit


class Gymnasium:
    """The five values, a seed, and a random beginning."""

    def reset(self, seed=None, options=None):
        self.secret = random.randint(0, 10**9)
        return f" <{self.secret % 10}{self.secret % 7}>", {}

    def step(self, action):
        return {"said": action}, 1, False, action == "stop", {}

    def close(self):
        raise RuntimeError("closing is no matter")


class Result:
    def __init__(self, observation, reward, done):
        self.observation, self.reward, self.done = observation, reward, done


class Bad:
    """Goes wrong as it is told."""

    def reset(self, how="", **kwargs):
        self.how = how
        if how == "reset":
            raise ValueError("no reset")
        return str(time.time_ns()) if how == "differs" else None

    def step(self, text):
        if text == "raise":
            raise KeyError("oh")
        if text == "hang":
            time.sleep(600)
        if text == "exit":
            os._exit(5)
        if text == "nan":
            return "", float("nan"), False
        return Result("fine", None, False) if text == "fine" else "no step"


class NoReset:
    def step(self, text):
        return "", 0.0, True


class NoMethods:
    def reset(self):
        return None


class OfOpenenv(type("Environment", (), {"__module__": "openenv.core"})):
    """Its turns are openenv's actions."""


class Leaves:
    """Ends its process when it is told to."""

    def reset(self):
        return None

    def do(self, how: str) -> str:
        """
        Do something.

        Args:
            how: raise or exit.
        """
        if how == "exit":
            os._exit(5)
        raise ValueError("no luck")

    def get_reward(self):
        return 1.0
