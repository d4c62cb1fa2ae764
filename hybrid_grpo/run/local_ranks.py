"""Starts the ranks of a run on this machine, as DeepSpeed's launcher does, which imports torch twice before it does so.

`python -m hybrid_grpo.run.local_ranks 2 train --config recipe.yaml` starts two ranks. Their watchers do the rest: they
end a rank after the death of another, and save the run if this process is killed (see stopping/watcher.py).
"""

import contextlib
import os
import random
import signal
import socket
import subprocess
import sys


def main() -> int:
    """Start the ranks, pass on the signals that ask a run to stop, and return the first status that is not 0."""
    count, *command = sys.argv[1:]
    shared = {"WORLD_SIZE": count, "LOCAL_SIZE": count, "CROSS_SIZE": "1"}
    shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    ranks: list[subprocess.Popen[bytes]] = []

    def pass_on(number: int, _: object) -> None:
        # A terminal sends Ctrl-C to the ranks too, and a rank that receives SIGINT twice ends without saving.
        for rank in ranks:
            rank.send_signal(signal.SIGTERM if number == signal.SIGINT else number)

    for stop in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
        signal.signal(stop, pass_on)
    for number in map(str, range(int(count))):
        environment = {**os.environ, **shared, "RANK": number, "LOCAL_RANK": number}
        ranks.append(subprocess.Popen([sys.executable, "-u", "-m", "hybrid_grpo", *command], env=environment))
    statuses = [rank.wait() for rank in ranks]
    return next((status if status > 0 else 128 - status for status in statuses if status), 0)


def free_port() -> str:
    """Return a port that nothing on this machine listens on. It is drawn, so that two runs that start at the same time
    get two, and lies below those that the system gives to connections: none takes it before the ranks meet there."""
    while True:
        port = random.SystemRandom().randint(20_000, 32_000)
        with contextlib.suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return str(port)


if __name__ == "__main__":
    sys.exit(main())
