"""An environment that may be lost; see tests/turns/test_turn_laws.py."""

import os
import random


class Leaves:
    """Talks without end when it is reset, and does what it is told."""

    def reset(self, **kwargs) -> str:
        return " ".join(str(random.randint(0, 9)) for _ in range(500))

    def do(self, how: str) -> str:
        """
        Do something.

        Args:
            how: raise or exit.

        Returns:
            What came of it.
        """
        if how == "exit":
            os._exit(5)
        raise ValueError("no luck")

    def get_reward(self) -> float:
        return 1.0
