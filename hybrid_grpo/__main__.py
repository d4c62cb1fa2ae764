"""The command line: `python -m hybrid_grpo COMMAND ...`, `hybrid-grpo COMMAND ...`, or under the deepspeed launcher.

No slow import happens before a command has read its settings.
"""

import gc
import importlib
import os
import signal
import sys
import time
from contextlib import nullcontext, suppress
from typing import NoReturn

if __name__ == "__main__" or os.path.basename(sys.argv[0]) == "hybrid-grpo":
    if sys.platform != "linux":
        sys.exit(f"hybrid-grpo: error: this is {sys.platform}, and hybrid_grpo needs Linux: a container, or WSL 2")
    # Ctrl-C while modules are imported ends the program without a traceback.
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    # Threads of torch that wait for each other give the core away after microseconds, to an agent or another run.
    os.environ.setdefault("GOMP_SPINCOUNT", "3000")

from hybrid_grpo import __version__
from hybrid_grpo.config.errors import RESUME_STATUS, RunInterrupted, RunStopped, UserError, refuse
from hybrid_grpo.run.launchers import adopt_rank
from hybrid_grpo.run.stopping.status import own_status, set_own_status, shared_status
from hybrid_grpo.run.stopping.watcher import watched

COMMANDS = {
    "train": "GRPO training",
    "sft": "supervised fine-tuning on prompt and completion pairs",
    "eval": "accuracy on held-out sets, with intervals; two models compared",
    "plan": "memory and time of a training run, without loading weights",
    "tune": "how a GPU's kernels share their work best, measured on it",
    "port": "our recipe from one of TRL, verl, OpenRLHF, ms-swift, Unsloth or LLaMA-Factory",
    "report": "write the report.html of a run again",
    "watch": "a page in the browser that shows runs, also while they train",
    "publish": "the trained model of a run with a model card, on the Hugging Face hub or in a folder",
    "generate": "completions of prompts from a file, a pipe or the terminal, as JSON lines",
    "chat": "a conversation with a model, a run or an adapter in the terminal",
    "score": "try reward functions on a file of completions, or on the rollouts of a run",
}
"""What each command does, by its name."""

_GRACE_SECONDS = 3.0


def main(arguments: list[str] | None = None) -> int:
    """Run one command and return the exit status: 0, 2 after a user error, RESUME_STATUS after an interruption."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:2], "--help", *arguments[2:]]
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: hybrid-grpo COMMAND [options]; `hybrid-grpo COMMAND --help` lists the options\n")
        print("\n".join(f"  {name:14} {what}" for name, what in COMMANDS.items()))
        return 0 if arguments else 2
    if arguments[0] == "--version":
        print(f"hybrid-grpo {__version__}")
        return 0
    command, *rest = arguments
    try:
        for argument in arguments:
            refuse(
                argument.startswith(("--local_rank", "--local-rank")),
                f"the deepspeed launcher added {argument}, which is not a setting: start it with --no_local_rank, as in"
                " deepspeed --no_local_rank --module hybrid_grpo train ...",
            )
        if command not in COMMANDS:
            raise UserError(f"there is no command {command}; the commands are {', '.join(COMMANDS)}")
        adopt_rank()
        from hybrid_grpo.config.parsing import reader_may_leave

        with nullcontext() if command in ("train", "sft") else reader_may_leave():
            importlib.import_module(f"hybrid_grpo.commands.{command.replace('-', '_')}").run(rest)
    except RunInterrupted as stop:
        if os.environ.get("RANK", "0") == "0":
            print(f"hybrid-grpo: {stop}", file=sys.stderr, flush=True)
        return RESUME_STATUS
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        where = "" if rank == "0" or isinstance(error, RunStopped) else f" [rank {rank}]"  # RunStopped: of all ranks
        line = f"error: {' '.join(str(error).split())}"
        if own_status().is_first_to_say(line, _GRACE_SECONDS):
            print(f"hybrid-grpo{where}: {line}", file=sys.stderr, flush=True)
        if os.environ.get("WORLD_SIZE", "1") != "1":
            # The launcher kills the other ranks as soon as one has ended: give slower ones time to print their error.
            time.sleep(_GRACE_SECONDS)
        return 2
    return 0


def _interrupted(number: int, _: object) -> NoReturn:
    """End the process and its workers at once: an exception amid imports would become others, or abort C++ code."""
    with suppress(OSError):
        own_status().forget_file()
        os.write(2, b"hybrid-grpo: interrupted\n")
    os._exit(128 + number)


def entry() -> NoReturn:
    """Run one command and exit with its status. The ranks of a run are watched (see run/stopping/watcher.py)."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started the process
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # until the process ends
    if os.environ.get("NO_COLOR") or not sys.stderr.isatty():
        # The bars of libraries, such as those of `datasets`, draw with control characters in log files too.
        os.environ.setdefault("TQDM_DISABLE", "1")
    with suppress(UserError):
        adopt_rank()
    if sys.argv[1:2] in (["train"], ["sft"], ["eval"]) and sys.platform == "linux":
        # Off until the engine starts: looking for garbage takes a seventh of the time that imports take.
        gc.disable()
        watched(main)
    signal.signal(signal.SIGINT, _interrupted)
    set_own_status(shared := shared_status())
    try:
        status = main()
    finally:
        shared.forget_file()
    for stream in (sys.stdout, sys.stderr):
        with suppress(OSError):
            stream.flush()
    os._exit(status)


if __name__ == "__main__":
    entry()
