"""Reward functions that do what the completion says, mostly things that a reward function should not do.

Imported by worker processes: nothing here imports torch.
"""

import asyncio
import ctypes
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

CALLS = UNDER_WAY = MOST = 0
"""Calls in this worker: all so far, under way now, and the most that were under way at once."""


def _raises() -> Any:
    raise KeyError("no such\nthing")


class _Odd:
    def __float__(self) -> float:
        return 1 / 0


def _recurses() -> Any:
    return _recurses()


def _long() -> Any:
    raise ValueError("x" * 5_000_000)


def _hangs() -> Any:
    while True:
        time.sleep(1)


def _ignores_signals() -> Any:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGALRM):
        signal.signal(number, signal.SIG_IGN)
    return _hangs()


def _hangs_with_children() -> Any:
    """One child in a session of its own, and one whose parent is gone."""
    subprocess.Popen(["sleep", "271"], start_new_session=True)
    subprocess.run(["sh", "-c", "setsid sleep 272 &"], check=True)
    return _hangs()


def _exits_with_children() -> Any:
    subprocess.Popen(["sleep", "273"], start_new_session=True)
    os.system("sleep 274 &")  # which has whatever descriptors the worker would hand down
    os._exit(3)


def _writes(*messages: bytes) -> Any:
    """Writes to every descriptor, the connection to the rank included."""
    for message in messages:
        for descriptor in range(3, 64):
            with suppress(OSError):
                os.write(descriptor, len(message).to_bytes(4, "big") + message)
    return [1.0]


def _forges_reply() -> Any:
    """Sends the rank text as a reward, under the number of its own call."""
    frame = sys._getframe()
    while "number" not in frame.f_locals:
        frame = frame.f_back
    return _writes(f'[{frame.f_locals["number"]}, ["1.0"], {{}}, {{}}, false, false]'.encode())


def spoils_its_process(completions: list[str]) -> list[float]:
    """Leaves its process without what another function needs."""
    sys.modules["json"].dumps = None
    os.chdir("/")
    subprocess.run = None
    return [1.0] * len(completions)


def needs_its_process(completions: list[str]) -> list[float]:
    """Starts a program in the folder of the run."""
    return [float(subprocess.run(["pwd"], check=True, capture_output=True).stdout != b"/\n")]


def _prints() -> Any:
    for _ in range(1000):
        print("x" * 1000)
        print("y" * 1000, file=sys.stderr)
    return [5.0]


ACTS: dict[str, Callable[[], Any]] = {
    "raises": _raises,
    "recurses": _recurses,
    "raises a long text": _long,
    "returns an odd number": lambda: [_Odd()],
    "returns nan": lambda: [float("nan")],
    "returns text": lambda: ["1.0"],
    "returns two": lambda: [1.0, 2.0],
    "returns none at all": lambda: None,
    "returns a huge list": lambda: [1.0] * 1_000_000,
    "returns huge steps": lambda: [[(1, 1.0)] * 1_000_000],
    "exits": lambda: sys.exit(3),
    "exits at once": lambda: os._exit(3),
    "kills itself": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "crashes": lambda: ctypes.string_at(0),
    "allocates": lambda: [float(len(bytearray(8 << 30)))],
    "kills its parent": lambda: os.kill(os.getppid(), signal.SIGKILL) or _hangs(),
    "closes descriptors": lambda: os.closerange(3, 1000) or [1.0],
    # A reply to another call, and no reply at all.
    "writes everywhere": lambda: _writes(b"[99, [1.0], {}, {}, false, false]", b"no reply"),
    "forges a reply": _forges_reply,
    "exits with children": _exits_with_children,
    "hangs": _hangs,
    "hangs in C": lambda: ctypes.CDLL(None).pause(),  # where no Python signal handler ever runs
    "ignores signals": _ignores_signals,
    "hangs with children": _hangs_with_children,
    "prints": _prints,
    "runs a loop": lambda: [asyncio.run(asyncio.sleep(0, 7.0))],
    "does not apply": lambda: [None],
}


def act(completions: list[str]) -> Any:
    """A number is its own reward; else what the text says."""
    (text,) = completions
    if text == "stops its parent":  # which is noticed when the run ends
        return os.kill(os.getppid(), signal.SIGSTOP) or [9.0]
    return [float(text)] if text.isdigit() else ACTS[text]()


async def act_async(completions: list[str]) -> Any:
    """Some of it beside other calls that sleep; a number takes a tenth of a second."""
    (text,) = completions
    if not text.isdigit():
        return ACTS[text]()
    await asyncio.sleep(0.1)
    return [float(text)]


async def sleeps(completions: list[str]) -> list[float]:
    """As many seconds as the completion says."""
    await asyncio.sleep(float(completions[0]))
    return [1.0]


def sleeps_plainly(completions: list[str]) -> list[float]:
    """Like `sleeps`, but a plain function, which sleeps for all rows of a call in turn."""
    time.sleep(sum(map(float, completions)))
    return [float(text) for text in completions]


def alarmed(completions: list[str]) -> list[float]:
    """Uses SIGALRM for a time limit of its own, as many graders do."""

    def ring(number: int, frame: Any) -> None:
        raise TimeoutError

    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return [float(threading.current_thread() is threading.main_thread())]
    return [-1.0]


def leaves_an_alarm(completions: list[str]) -> list[float]:
    """Sets an alarm and forgets it."""
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    time.sleep(float(completions[0]))
    return [1.0]


def letters(completions: list[str], completion_ids: list[list[int]], answer: list[str]) -> list[Any]:
    """A step for every token, with reward 1 if it is the expected letter; tokens 0 and 1 are no letters."""

    def right(c: str, ids: list[int], a: str, i: int) -> float:
        at = sum(token > 1 for token in ids[:i])
        return float(ids[i] > 1 and c[at : at + 1] == a[at : at + 1])

    return [
        [(i + 1, right(c, ids, a, i)) for i in range(len(ids))]
        for c, ids, a in zip(completions, completion_ids, answer, strict=True)
    ]


def letter_pieces(completions: list[str], answer: list[str]) -> list[Any]:
    """Like `letters`, with the steps given as text."""
    return [
        [(letter, float(letter == a[i : i + 1])) for i, letter in enumerate(c)]
        for c, a in zip(completions, answer, strict=True)
    ]


def leaves_files(completions: list[str], folder: str | None = None) -> list[float]:
    """After 50 ms makes a file named by each completion."""
    time.sleep(0.05)
    for text in completions if folder else ():
        (Path(folder) / text).touch()
    return [float(text) for text in completions]


def meets(completions: list[str], folder: str) -> list[float]:
    """Waits until as many calls are under way as the completion says."""
    (Path(folder) / str(os.getpid())).touch()
    while len(os.listdir(folder)) < int(completions[0]):
        time.sleep(0.01)
    return [1.0]


async def most_at_once(completions: list[str]) -> list[int]:
    """Waits like `meets`; the reward is the most calls that were under way at once."""
    global UNDER_WAY, MOST
    UNDER_WAY += 1
    MOST = max(MOST, UNDER_WAY)
    while int(completions[0]) > MOST:
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.2)  # so that one too many would be seen
    UNDER_WAY -= 1
    return [MOST]


def allocates(completions: list[str]) -> list[float]:
    """Allocates as many MiB as the completion says."""
    return [float(len(bytearray(int(completions[0]) << 20)))]


def counts(completions: list[str]) -> list[int]:
    """How often this process was called."""
    global CALLS
    CALLS += 1
    return [CALLS]


def knows_torch(completions: list[str]) -> list[bool]:
    """Whether the process has loaded torch, or a library that does."""
    return [bool({"torch", "transformers", "datasets", "deepspeed"} & sys.modules.keys())]


def lengths_of_calls(completions: list[str]) -> list[int]:
    """How many completions the call has."""
    return [len(completions)] * len(completions)


lengths_of_calls.batch_size = 3  # type: ignore[attr-defined]


def no_zero(completions: list[str], log_extra: Callable[[str, list[Any]], None]) -> list[float]:
    """A call with 0 among its completions fails; the number of completions of each call is stored."""
    log_extra("rows", [len(completions)] * len(completions))
    return [1 / float(text) for text in completions]


def spoils(prompts: list[Any], completions: list[str], answer: list[Any]) -> list[float]:
    """Changes all its arguments, nested ones too."""
    prompts[0][0]["content"] = "spoilt"
    completions.clear()
    answer[0]["x"].append(1)
    return [float(len(answer[0]["x"]))]


def messages_said(completions):
    """How much is said in a conversation, by everybody."""
    return [sum(len(str(message["content"])) for message in chat) / 100 for chat in completions]


def prints(completions, **kwargs):
    print("x" * 80_000)
    return [1.0] * len(completions)
