"""A rank's watcher: the small process that starts a rank, and ends it when it cannot end itself.

It keeps working when the rank is stuck in Python or C, stopped by SIGSTOP, or has crashed. It is the parent of the rank
and of all processes that the rank leaves behind. It

- passes on requests to stop (SIGINT, SIGTERM, SIGUSR1, SIGHUP), and ends a rank that takes longer than `run.grace_s`;
- asks the rank to stop when the launcher that started it is gone;
- ends the rank when another rank of the machine has died, or nothing is heard from one on another machine;
- notices when no rank of the machine shows a sign of life, and prints where each one stands;
- kills what the rank has started once the rank has ended, and ends with the rank's status.

It needs Linux, and imports nothing that is slow to import.
"""

import os
import re
import signal
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NoReturn

from hybrid_grpo.config.errors import RESUME_STATUS
from hybrid_grpo.distributed.workers.family import adopt_orphans, descendants, die_with_parent, kill
from hybrid_grpo.run.stopping import status as statuses

_STOPS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
_LOOK_SECONDS, _LONG_SECONDS = 0.5, 5.0
"""Time between two checks of a rank, and the gap between checks that shows that this process was suspended."""
_STOPPED_WITH_WATCHER = 4
"""`RankStatus.behind` of a rank that is stopped together with its watcher."""
_GRACE_SECONDS = 20.0
_LAUNCHER_GRACE_SECONDS = 10.0
_FOLLOW_SECONDS = 5.0
"""A rank whose collective fails waits this long for news that another rank has died, which would be the reason. A rank
that lives on after another's death is ended after this time."""
_LOST_SECONDS = 180.0
"""Time without a sign of life from a rank, which may be on another machine, after which this rank is ended."""
_INNERMOST = 8
"""Number of innermost frames of a stack that are searched for a collective."""
_STACK_SECONDS, _VERDICT_SECONDS = 2.0, 4.0
"""Time from a noticed stall until ranks must have printed their stacks, and until the verdict is printed."""
_ENDED = "ended; --run.resume auto continues from the last checkpoint"
_LEFTOVER_SECONDS = 3.0
"""Time that processes left behind by a successful rank have to end by themselves."""
_LAUNCHERS = re.compile(
    r"(^|/)(deepspeed|torchrun|mpirun|mpiexec|prterun|orted|prted|hydra_pmi_proxy|slurmstepd)(:|$)"
    r"|^(deepspeed\.launcher|torch\.distributed)\.|deepspeed/launcher/\w+\.py$|^hybrid_grpo\.run\.local_ranks$"
)
_HELPER = re.compile(r"^deepspeed\.launcher\.launch$|deepspeed/launcher/launch\.py$")
"""Matches the process of DeepSpeed's launcher that another process of it has started."""
_OF_LAUNCHERS = ("CROSS_SIZE", "TORCHELASTIC_RUN_ID")
"""Variables that the launchers of DeepSpeed and torch set for their ranks."""
_COLLECTIVE = re.compile(r"torch/distributed/|deepspeed/comm/|/gloo/|NCCL| in wait_for_all\b")
"""Matches a line of a stack, or the error of a failed collective."""


def watched(work: Callable[[], int]) -> NoReturn:
    """Run `work` in a watched rank; end this process with the rank's status, or 128 plus the signal that ended it."""
    shared = statuses.shared_status()
    mine = shared.mine
    mine.watcher, mine.grace_s = os.getpid(), _GRACE_SECONDS
    mine.started = mine.tick = time.monotonic()
    statuses.set_own_status(shared)
    stops = {number for number in _STOPS if signal.getsignal(number) != signal.SIG_IGN}
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {*stops, signal.SIGCHLD})
    launchers = _launchers() if "RANK" in os.environ else []
    adopt_orphans()
    stacks = os.memfd_create("stacks")
    watcher = os.getpid()
    if shared.rank == 0:
        _write_status("running")
    pid = os.fork()
    if not pid:
        _be_watched(shared, stops, stacks, watcher)
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        status = _outcome(work, shared)
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError):
                stream.flush()
        # Skip the interpreter's shutdown: threads of the process groups that DeepSpeed keeps abort it now and then
        # ("terminate called without an active exception"), which would turn a finished run into a failed one.
        os._exit(status)
    _Watcher(shared, pid, launchers, stacks).watch(stops)


def _be_watched(shared: statuses.SharedStatus, stops: set[signal.Signals], stacks: int, watcher: int) -> None:
    import faulthandler

    die_with_parent()
    if os.getppid() != watcher:
        os._exit(128 + signal.SIGKILL)
    shared.listen(stops)
    # Prints the stacks even if the interpreter is stuck.
    faulthandler.register(signal.SIGUSR2, file=stacks, all_threads=True)


def _outcome(work: Callable[[], int], shared: statuses.SharedStatus) -> int:
    """Do the work and return its status. If it fails because another rank died, only report that rank's death."""
    try:
        return work()
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)[-_INNERMOST:]
        if not any(_COLLECTIVE.search(text) for text in (str(error), *map(str, frames))):
            raise
        deadline = time.monotonic() + _FOLLOW_SECONDS
        while time.monotonic() < deadline:
            if (dead := _dead_rank(shared)) is not None:
                _say(shared, _blame(shared, dead))
                return dead[1]
            time.sleep(0.05)
        raise


def _dead_rank(shared: statuses.SharedStatus) -> tuple[int, int] | None:
    """Return another rank of this machine that failed, or whose watcher was killed, with its status, or None."""
    for rank, entry in enumerate(shared.entries):
        if rank != shared.rank and entry.tick > shared.mine.started:
            if entry.status > 0:
                return rank, entry.status
            if entry.status == statuses.RUNNING and not _lives(entry.watcher):
                return rank, 128 + signal.SIGKILL
    return None


def _blame(shared: statuses.SharedStatus, dead: tuple[int, int]) -> str:
    return f"ended in {statuses.PHASES[shared.mine.phase]}, because rank {dead[0]} has ended with status {dead[1]}"


def _say(shared: statuses.SharedStatus, message: str) -> None:
    with suppress(OSError):
        print(f"hybrid-grpo [rank {shared.rank}]: {message}", file=sys.stderr, flush=True)


class _Watcher:
    def __init__(self, shared: statuses.SharedStatus, pid: int, launchers: list[tuple[int, str]], stacks: int) -> None:
        self.shared, self.mine, self.pid, self.launchers, self.stacks = shared, shared.mine, pid, launchers, stacks
        self.interrupts = 0
        self.dead: tuple[int, int] | None = None
        self.dead_since = 0.0
        self.awake = self.mine.started
        """When this process was resumed after the whole run, or the machine, had been suspended."""

    def watch(self, stops: set[signal.Signals]) -> NoReturn:
        while True:
            received = signal.sigtimedwait({*stops, signal.SIGCHLD}, _LOOK_SECONDS)
            # If SIGSTOP and SIGCONT interrupt the wait until its timeout, it returns uninitialized data.
            if received and received.si_signo in stops:
                self.shared.ask(received.si_signo)
                self.interrupts += received.si_signo == signal.SIGINT
                if self.interrupts == 2:
                    self.end(128 + signal.SIGINT, "interrupted twice: stopped at once")
            status = self.rank_status()
            if status is not None:
                self.leave(status)
            now = time.monotonic()
            if now - self.mine.tick > _LONG_SECONDS:
                self.awake = now
            self.mine.tick = now
            self.look(now)

    def rank_status(self) -> int | None:
        """Return the exit status of the rank, or None while it runs. Also reap other processes that have ended."""
        with suppress(ChildProcessError):
            while ended := os.waitpid(-1, os.WNOHANG):
                if ended[0] == self.pid:
                    code = os.waitstatus_to_exitcode(ended[1])
                    return code if code >= 0 else 128 - code
                if not ended[0]:
                    break
        return None

    def look(self, now: float) -> None:
        mine = self.mine
        if mine.behind == _STOPPED_WITH_WATCHER:
            self.end(RESUME_STATUS, "was stopped for longer than run.stall_minutes: ended")
        if any(not _lives(*launcher) for launcher in self.launchers):
            self.shared.ask(statuses.LAUNCHER_GONE)
        if mine.asked:
            most_s = _LAUNCHER_GRACE_SECONDS if mine.cause == statuses.LAUNCHER_GONE else mine.grace_s
            grace_s = min(mine.grace_s, most_s)
            if mine.phase == 0:
                self.end(RESUME_STATUS, "stopped before there was anything to save")
            if now - mine.asked > grace_s and mine.cause != statuses.TIME_OVER:
                phase = statuses.PHASES[mine.phase]
                self.end(RESUME_STATUS, f"{phase} did not end within {grace_s:g} s of the request to stop: {_ENDED}")
        if mine.heard and now - max(mine.heard, self.awake) > _LOST_SECONDS:
            self.end(RESUME_STATUS, f"rank {mine.silent} has shown no sign of life for {_LOST_SECONDS:g} s: {_ENDED}")
        if self.dead is None:
            self.dead, self.dead_since = _dead_rank(self.shared), now
        elif now - self.dead_since > _FOLLOW_SECONDS:
            self.end(self.dead[1], _blame(self.shared, self.dead))
        entries = [self.shared.entries[rank] for rank in self.running()]
        stalled = [entry.stalled for entry in entries if entry.stalled]
        # Ranks wait for each other: while one shows signs of life, the others do not count as stalled.
        signs = min(max(entry.beat for entry in entries), min(entry.tick for entry in entries))
        if mine.phase and mine.stall_s and now - max(signs, self.awake) > mine.stall_s and not stalled:
            mine.stalled = now
            stalled = [now]
        if stalled:
            self.report_stall(min(stalled))

    def running(self) -> list[int]:
        """Return the ranks of this machine that have not ended. An older entry belongs to an earlier run at the same
        port. This rank is always included, since another run at that port may have overwritten its entry."""
        entries = enumerate(self.shared.entries)
        mine = self.shared.rank
        return [r for r, e in entries if r == mine or (e.status == statuses.RUNNING and e.tick > self.mine.started)]

    def report_stall(self, since: float) -> NoReturn:
        """Print where this rank stands; one rank per machine also prints which rank is behind. Then end the rank with
        the status of a run that can be resumed."""
        mine, entries, minutes = self.mine, self.shared.entries, (since - self.mine.beat) / 60
        stopped = (_stat(self.pid) or ["X"])[0] in "tT"
        stack = [] if stopped else self.stack(since + _STACK_SECONDS)
        waits = any(_COLLECTIVE.search(line) for line in stack[:_INNERMOST])
        mine.behind = 3 if stopped else 2 if not stack else 0 if waits else 1
        doing = "is stopped (SIGSTOP)" if stopped else "waits for other ranks" if waits else "makes no progress"
        place = f"{doing} in {_where(mine)}, {minutes:.1f} minutes without a sign of life"
        _say(self.shared, "\n".join([place, *stack]))
        ranks = self.running()
        time.sleep(max(0.0, since + _VERDICT_SECONDS - time.monotonic()))
        mine.tick = time.monotonic()
        for rank in ranks:
            if entries[rank].tick < since:  # its watcher is stopped as well
                entries[rank].behind = _STOPPED_WITH_WATCHER
        worst = max(ranks, key=lambda rank: (entries[rank].behind, -entries[rank].beat))
        if self.shared.rank == min(rank for rank in ranks if entries[rank].behind < _STOPPED_WITH_WATCHER):
            _say(
                self.shared,
                f"run.stall_minutes {mine.stall_s / 60:g}: no rank makes progress; rank {worst} is behind, in"
                f" {_where(entries[worst])}: {_ENDED}",
            )
        else:
            time.sleep(_LOOK_SECONDS)  # so that the verdict is printed before a launcher sees a rank end
        for rank in ranks:
            if entries[rank].behind == _STOPPED_WITH_WATCHER:
                with suppress(OSError):
                    os.kill(entries[rank].watcher, signal.SIGCONT)
        self.end(RESUME_STATUS, "")

    def stack(self, deadline: float) -> list[str]:
        """Return the lines of the rank's Python stack (main thread), innermost first; none if it does not answer."""
        with suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGUSR2)
        while time.monotonic() < deadline:
            self.mine.tick = time.monotonic()
            time.sleep(0.1)
            text = os.pread(self.stacks, 1 << 20, 0).decode(errors="replace")
            # The thread that received the signal comes last.
            if found := text.partition("Current thread")[2]:
                return found.splitlines()[1:]
        return []

    def end(self, status: int, why: str) -> NoReturn:
        if why:
            _say(self.shared, why)
        kill([self.pid])
        self.leave(status)

    def leave(self, status: int) -> NoReturn:
        """Kill the processes that the rank has started, and end with `status`."""
        # A new tick, so that ranks which started after the last one see this end; see `_dead_rank`.
        self.mine.tick, self.mine.status = time.monotonic(), status
        _end_descendants(time.monotonic() + (_LEFTOVER_SECONDS if status == 0 else 0.0))
        self.shared.forget_file()
        if self.shared.rank == 0:
            _write_status(str(status))
        os._exit(status)


def _where(entry: statuses.RankStatus) -> str:
    beats = f", after {entry.beats} decode steps or micro-batches" if entry.beats else ""
    return f"{statuses.PHASES[entry.phase]} (step {entry.step}{beats})"


def _write_status(status: str) -> None:
    """Write the status to the file that training_scripts/launch.sh names, as launchers do not exit with it."""
    if path := os.environ.get("HYBRID_GRPO_STATUS"):
        with suppress(OSError):
            Path(path).write_text(status)


def _end_descendants(patience: float) -> None:
    """Wait until the time `patience` for the descendants of this process to end, then kill the rest."""
    deadline = max(time.monotonic(), patience) + 10.0
    while (pids := descendants(os.getpid())) and time.monotonic() < deadline:
        if time.monotonic() >= patience:
            kill(pids)
        time.sleep(0.02)
        with suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass


def _stat(pid: int) -> list[str]:
    """Return the fields of /proc/PID/stat from the state on; empty if there is no such process."""
    with suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    return []


def _lives(pid: int, start: str | None = None) -> bool:
    stat = _stat(pid)
    return bool(stat) and stat[0] not in "ZX" and start in (None, stat[19])


def _launchers() -> list[tuple[int, str]]:
    """Return the launcher processes above this one, each with its start time. Process id 0: it has already ended."""
    found, child, pid = [], os.getpid(), os.getppid()
    was_started = any(name in os.environ for name in _OF_LAUNCHERS)
    while stat := _stat(pid):
        command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")[:5]
        if not any(_LAUNCHERS.search(word) for word in command):
            break
        found.append((pid, stat[19]))
        was_started = any(_HELPER.search(word) for word in command)
        child, pid = pid, int(stat[1])
    if was_started and _is_orphan(child):
        found.append((0, ""))  # was killed before this look, so it is not among those above
    return found


def _is_orphan(pid: int) -> bool:
    """Return whether a process has lost its first parent: its parent is now init or a process of another session."""
    _, parent, _, session, *_ = _stat(pid) or ["", "0", "", ""]
    of_parent = _stat(int(parent))
    return bool(of_parent) and (parent == "1" or (session != str(pid) and session != of_parent[3]))
