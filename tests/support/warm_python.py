"""The programs that scripts in bash start, as forks of a process that has imported all; see forks.py.

A recipe starts ten interpreters one after the other, most of which would import torch or DeepSpeed.
"""

import atexit
import functools
import json
import shutil
import socket
import sys
import tempfile
import threading
from contextlib import suppress
from multiprocessing.connection import wait
from pathlib import Path

import forks
from paths import SUPPORT


@functools.cache
def programs() -> Path:
    """A folder with `python`, `deepspeed` and `hybrid-grpo`, to be the first of PATH, until this process ends."""
    folder = Path(tempfile.mkdtemp(prefix="programs"))
    atexit.register(shutil.rmtree, folder)
    # Without what the environment has installed: the client needs the standard library alone.
    client = f"#!{sys.executable} -IS\n" + (SUPPORT / "warm_client.py").read_text()
    for program in ("python", "deepspeed", "hybrid-grpo"):
        (folder / program).write_text(client)
        (folder / program).chmod(0o755)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(folder / "socket"))
    listener.listen()
    threading.Thread(target=_accept, args=[listener], daemon=True).start()
    return folder


def _accept(listener: socket.socket) -> None:
    while True:
        threading.Thread(target=_serve, args=[listener.accept()[0]], daemon=True).start()


def _serve(connection: socket.socket) -> None:
    """Start what a client asks for, tell it the number of the process, and in the end its status."""
    with suppress(BrokenPipeError), connection, connection.makefile("rw") as client:
        asked = json.loads(client.readline())
        streams = [Path(f"/proc/{asked['pid']}/fd/{number}") for number in range(3)]
        told = (asked["arguments"], Path(asked["cwd"]), asked["environment"], streams)
        process = forks.start(*told, executable=asked["executable"])
        client.write(f"{process.pid}\n")
        client.flush()
        if process.sentinel not in wait([process.sentinel, connection]):
            process.kill()  # the client has been killed
        process.join()
        client.write(f"{process.exitcode}\n")
        client.flush()
