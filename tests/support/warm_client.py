"""`python`, `deepspeed` and `hybrid-grpo` of warm_python.py: asks for a fork that is the program, and passes on what
the two tell each other beside their streams: signals and the status.

Imports little, as it is started for every program. A program that comes on standard input, or that is handed more
descriptors than the usual three, gets an interpreter of its own.
"""

import json
import os
import signal
import socket
import sys
from contextlib import suppress

modules = {"python": [], "deepspeed": ["-m", "deepspeed.launcher.runner"], "hybrid-grpo": ["-m", "hybrid_grpo"]}
arguments = [*modules[os.path.basename(__file__)], *sys.argv[1:]]
if arguments[:1] == ["-u"]:
    arguments = arguments[1:]
handed = [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]
is_plain = bool(arguments) and (arguments[0] in ("-c", "-m") or not arguments[0].startswith("-"))
# The descriptor of the listing itself is closed by now.
if not is_plain or any(os.path.exists(f"/proc/self/fd/{number}") for number in handed):
    os.execv(sys.executable, [sys.executable, *arguments])

connection = socket.socket(socket.AF_UNIX)
connection.connect(os.path.join(os.path.dirname(__file__), "socket"))
answers = connection.makefile("rw")
executable = os.path.join(os.path.dirname(__file__), "python")
told = {"pid": os.getpid(), "arguments": arguments, "cwd": os.getcwd(), "environment": dict(os.environ)}
answers.write(json.dumps({**told, "executable": executable}) + "\n")
answers.flush()
fork = int(answers.readline())


def pass_on(number: int, _: object) -> None:
    with suppress(ProcessLookupError):  # it has ended, and its status is on the way
        os.kill(fork, number)


for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
    signal.signal(number, pass_on)
status = int(answers.readline())
if status < 0:
    if -status != signal.SIGKILL:
        signal.signal(-status, signal.SIG_DFL)
    os.kill(os.getpid(), -status)
sys.exit(status)
