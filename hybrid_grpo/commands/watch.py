"""`watch`: serves a web page that shows runs, even while they train. Files are only read, never changed."""

import getpass
import os
import socket
import sys
from pathlib import Path

from hybrid_grpo.commands.configs import WatchConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse

COMMAND = "watch RUNS..."


def run(arguments: list[str]) -> None:
    """Serve the page until SIGINT or SIGTERM; RUNS are run folders, or folders that contain run folders."""
    count = next((at for at, argument in enumerate(arguments) if argument.startswith("-")), len(arguments))
    named, options = arguments[:count], arguments[count:]
    config = parse(WatchConfig, options, COMMAND).config
    if not named:
        raise UserError(f"usage: hybrid-grpo {COMMAND} [--watch.port N]")

    from hybrid_grpo.watch import server
    from hybrid_grpo.watch.folders import Folders

    folders = Folders([Path(name) for name in named])
    port = config.watch.port
    try:
        listener = server.listen(port)
    except OSError as error:
        raise UserError(
            f"cannot listen on watch.port {port}: {error.strerror or error}: give another, or 0 for a free one"
        ) from None
    port = listener.getsockname()[1]
    words = f"http://{server.HOST}:{port} shows {', '.join(named)}{_from_elsewhere(port)}"
    server.serve(server.application(folders), listener, lambda: print(words, file=sys.stderr))


def _from_elsewhere(port: int) -> str:
    """Return a line with the command that brings the page to the machine that the user came from by ssh."""
    if "SSH_CONNECTION" not in os.environ:
        return ""
    here = f"{getpass.getuser()}@{socket.gethostname()}"
    return f"\non your own machine: ssh -N -L {port}:127.0.0.1:{port} {here}"
