"""An environment whose turns say what it does to its process."""

import os
import signal
import time
from contextlib import suppress


class Acts:
    """Says in which process it is, its turn, and how long the turn's text was; or does what the text says."""

    def reset(self, **columns):
        self.turns = 0

    def step(self, text):
        self.turns += 1
        if text == "hang":
            time.sleep(600)
        if text == "exit":
            os._exit(5)
        if text == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if text == "memory":
            raise MemoryError
        if text == "write":
            for descriptor in range(3, 64):
                with suppress(OSError):
                    os.write(descriptor, b"\0\0\0\x04junk")
        said = "x" * 1_000_000 if text == "long" else f"{os.getpid()} {self.turns} {len(text)}"
        return said, None, False
