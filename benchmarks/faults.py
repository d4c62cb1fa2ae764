"""Break real runs on two ranks in every way that PARTS lists, and check that nothing is lost.

    python benchmarks/faults.py                                    all of it, about an hour on two cores
    python benchmarks/faults.py --kills 6 --corruptions 6          only these, as many as given
    python benchmarks/faults.py --kills 60 --json FILE             numbers for benchmarks/results/faults.json

Each entry of the result has `case` and `passed`, and where it did not pass, `why`. "Whole" is the same run, never
broken: metrics (but for times, rates and memory), rollouts, success rates of prompts and exported weights are compared
byte by byte. Ranks are forked from a process that has imported what they need; if the launcher is to be killed, the
real one starts them. All processes must end within their limits, and the next start must finish the run as the whole
one.
"""

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fault_bench import Bench, started
from machine import machine, parser_of, save

STAGES = ("sampling", "scoring", "update", "evaluation", "saving", "export")
ACTIONS = ("raise", "exit", "hang in Python", "hang in C", "stopped")
GONE_S, GRACE_S, STALL_S = 15.0, 30.0, 30.0
"""Seconds until all processes must be gone after a kill, after a request to stop, and after the limit of a stall."""
STALL_MINUTES = 0.5
"""Long enough for any stage of such a small run, also on a slow or busy machine."""
RESUME_ME = 75
FOUR_STEPS = {"point": "update", "nth": 5, "rank": "all", "action": "kill"}
"""A run that is killed in its fifth step."""

Entry = dict[str, Any]
Case = tuple[str, Callable[..., Entry], tuple[Any, ...]]
"""A name, the function that breaks a run, and its arguments after the bench and the name of a folder."""


def tried(bench: Bench, case: str, break_it: Callable[..., Entry], arguments: tuple[Any, ...]) -> Entry:
    """One case, in a folder of its own; a failed assertion is its `why`."""
    name, start = re.sub(r"\W+", "_", case), time.monotonic()
    try:
        entry = {"case": case, "passed": True, **break_it(bench, name, *arguments)}
    except AssertionError as error:
        entry = {"case": case, "passed": False, "why": str(error)}
    entry["seconds"] = round(time.monotonic() - start, 1)
    shutil.rmtree(bench.folder / name, ignore_errors=True)
    word = "ok  " if entry["passed"] else "FAIL"
    print(f"{word} {entry['seconds']:6.1f} s  {case}  {entry.get('why', '')}", flush=True)
    return entry


def kills(bench: Bench, number: int) -> Iterator[Case]:
    """SIGKILL to a rank, to all, to the launcher or to its helper, at random moments and at named points."""
    points = [(stage, nth) for nth in (2, 1) for stage in (*STAGES, "logging", "start", "fsync", "rename", "rename")]
    for count in range(number):
        target = ("rank 0", "rank 1", "all ranks")[count % 3]
        if count % 6 == 5:
            program = ("the launcher", "the launcher's helper")[count // 6 % 2]
            moment = bench.random.uniform(10.0, 14.0 + bench.seconds)
            yield f"kill {count}: {program} after {moment:.1f} s", _kill_launcher, (program, moment)
        elif count % 2:
            moment = bench.random.uniform(0.0, bench.seconds)
            yield f"kill {count}: {target} after {moment:.2f} s", _kill_later, (target, moment)
        else:
            stage, nth = points[count // 2 % len(points)]
            if stage in ("start", "export"):
                nth = 1
            elif stage in ("fsync", "rename", "sampling"):
                nth += bench.random.randrange(40)
            # Only rank 0 does everything.
            rank = 0 if stage in ("fsync", "rename", "logging") else {"rank 0": 0, "rank 1": 1}.get(target, "all")
            fault = {"point": stage, "nth": nth, "rank": rank, "action": "kill"}
            yield (f"kill {count}: rank {rank} at {stage} {nth}", kill_at, (fault,))


def _resumed(bench: Bench, name: str, gone_s: float) -> Entry:
    done = bench.lines(name)
    bench.same(name, *bench.run(name))
    return {"gone_s": round(gone_s, 2), "steps_before": max(done - 1, 0)}


def kill_at(bench: Bench, name: str, fault: Entry) -> Entry:
    """Let a run kill itself, and resume it."""
    with bench.ranks(name, fault=fault) as ranks:
        started(ranks)
        gone_s = bench.gone_after(GONE_S)
    return _resumed(bench, name, gone_s)


def _kill_later(bench: Bench, name: str, target: str, moment: float) -> Entry:
    with bench.ranks(name) as ranks:
        time.sleep(moment)
        for rank, process in enumerate(ranks.processes):
            if target in (f"rank {rank}", "all ranks") and process.is_alive():
                process.kill()
        gone_s = bench.gone_after(GONE_S)
    return _resumed(bench, name, gone_s)


def _kill_launcher(bench: Bench, name: str, program: str, moment: float) -> Entry:
    with bench.launched(name) as started:
        time.sleep(moment)
        helper = {"the launcher": "bin/deepspeed", "the launcher's helper": "deepspeed.launcher.launch"}[program]
        for pid in bench.alive():
            if helper in Path(f"/proc/{pid}/cmdline").read_text().replace("\0", " "):
                os.kill(pid, signal.SIGKILL)
        gone_s = bench.gone_after(GONE_S)
        started.communicate()
    return _resumed(bench, name, gone_s)


def writes(bench: Bench, number: int) -> Iterator[Case]:
    """SIGKILL to ranks whose threads copy, write and publish a checkpoint: before a call of it, or a moment after."""
    # Of seven saves the first and the last are waited for. Each copies once, writes three files, and removes what was
    # replaced and, from the fourth on, the oldest.
    points = {"copying": (1, 5), "writing": (4, 18), "a note": (2, 6), "the manifest": (2, 6), "removing": (2, 9)}
    for count in range(number):
        point = list(points)[count % len(points)]
        rank = 0 if point in ("the manifest", "removing") else (0, 1, "all")[count // len(points) % 3]
        nth, moment = bench.random.randint(*points[point]), bench.random.choice([0.0, bench.random.uniform(0.0, 0.2)])
        fault = {"point": point, "nth": nth, "rank": rank, "action": "kill", "after": round(moment, 3)}
        yield f"write {count}: rank {rank} {moment:.3f} s after {point} {nth}", kill_writing, (fault,)


def kill_writing(bench: Bench, name: str, fault: Entry) -> Entry:
    """Let a run kill itself, and resume it: from the newest checkpoint that is in place."""
    with bench.ranks(name, fault=fault) as ranks:
        started(ranks)
        gone_s = bench.gone_after(GONE_S)
    tags = [path.name for path in (bench.folder / name / "run" / "checkpoints").glob("step_*")]
    assert tags, "the first checkpoint was there before anything broke"
    newest, left = max(int(tag.removeprefix("step_")) for tag in tags), bench.lines(name)
    status, said = bench.run(name)
    bench.same(name, status, said)
    assert f"after step {newest}\n" in said, f"step {newest} is the newest checkpoint: {said[-600:]}"
    return {"gone_s": round(gone_s, 2), "checkpoint": newest, "steps_repeated": max(left - 1, 0) - newest}


def signals(bench: Bench, number: int) -> Iterator[Case]:
    """Requests to stop, to one rank or to all, at random moments after the start: status 75."""
    for count in range(number):
        name = ("SIGTERM", "SIGTERM", "SIGINT", "SIGUSR1")[count % 4]
        target = ("rank 0", "rank 1", "all ranks")[count % 3]
        moment = bench.random.uniform(0.3 * bench.seconds, 0.95 * bench.seconds)
        yield f"{name} {count} to {target} after {moment:.2f} s", _signal, (name, target, moment)


def _signal(bench: Bench, name: str, number: str, target: str, moment: float) -> Entry:
    with bench.ranks(name) as ranks:
        time.sleep(moment)
        for rank, process in enumerate(ranks.processes):
            if target in (f"rank {rank}", "all ranks") and process.is_alive():
                os.kill(process.pid, getattr(signal, number))
        gone_s = bench.gone_after(GRACE_S)
        statuses = ranks.statuses()
    said = "".join(ranks.output)
    finished = (bench.folder / name / "run" / "model").exists() and statuses == [0, 0]
    assert finished or statuses == [RESUME_ME] * 2, f"statuses {statuses}: {said[-600:]}"
    assert "Traceback" not in said, said[-600:]
    return _resumed(bench, name, gone_s)


def corruptions(bench: Bench, number: int) -> Iterator[Case]:
    """Damages to the newest checkpoint of a run that was killed after its fourth step."""
    bench.run("base", fault=FOUR_STEPS)
    folders = sorted((bench.folder / "base" / "run" / "checkpoints").glob("step_*"))
    newest, before = folders[-1], folders[-2]
    files = sorted(str(path.relative_to(newest)) for path in newest.rglob("*") if path.is_file())
    cases: list[tuple[str, Callable[[Path], None]]] = []
    for file in files:
        other = next((f for f in files if f != file and re.sub(r"\d", "", f) == re.sub(r"\d", "", file)), None)
        cases += [
            (f"{file} cut", lambda c, f=file: os.truncate(c / f, (c / f).stat().st_size // 2)),
            (f"{file} empty", lambda c, f=file: os.truncate(c / f, 0)),
            (f"{file} with a flipped bit", lambda c, f=file: _overwrite(c / f, 0.6, None)),
            (f"{file} with another first byte", lambda c, f=file: _overwrite(c / f, 0.0, None)),
            (f"{file} with a byte more", lambda c, f=file: (c / f).write_bytes((c / f).read_bytes() + b"\0")),
            (f"{file} with zeros", lambda c, f=file: _overwrite(c / f, 0.3, 64)),
            (f"{file} deleted", lambda c, f=file: (c / f).unlink()),
            (f"{file} of another step", lambda c, f=file: shutil.copy(c.parent / before.name / f, c / f)),
        ]
        if other is not None and (newest / file).read_bytes() != (newest / other).read_bytes():
            cases.append((f"{file} swapped with {other}", lambda c, f=file, o=other: _swap(c / f, c / o)))
    cases += [
        ("both newest deleted", lambda c: [shutil.rmtree(c.parent / folder.name) for folder in (newest, before)]),
        ("latest missing or not", lambda c: (c.parent / "latest").write_text("")),
        ("latest binary", lambda c: (c.parent / "latest").write_bytes(bytes(range(256)))),
        ("a folder more", lambda c: shutil.copytree(c, c.with_name("step_000099"))),
        ("a draft of a killed save", lambda c: shutil.copytree(c, c.with_name(".draft_step_000005"))),
    ]
    bench.random.shuffle(cases)
    for case, damage in cases[:number]:
        harmless = case.startswith(("latest", "a draft", "both"))
        yield f"corruption: {case}", _damage, (newest.name, damage, harmless)


def _overwrite(path: Path, where: float, count: int | None) -> None:
    data = bytearray(path.read_bytes())
    at = int(len(data) * where)
    if count is None:
        data[at] ^= 1
    else:
        at -= 0 if any(data[at : at + count]) else next(k for k in range(at) if any(data[at - k : at - k + count]))
        data[at : at + count] = bytes(len(data[at : at + count]))
    path.write_bytes(data)


def _swap(one: Path, other: Path) -> None:
    one_data = one.read_bytes()
    one.write_bytes(other.read_bytes())
    other.write_bytes(one_data)


def _damage(bench: Bench, name: str, newest: str, damage: Callable[[Path], Any], harmless: bool) -> Entry:
    shutil.copytree(bench.folder / "base", bench.folder / name)
    damage(bench.folder / name / "run" / "checkpoints" / newest)
    status, said = bench.run(name)
    bench.same(name, status, said)
    told = [line for line in said.splitlines() if "passed over" in line]
    assert harmless or len(told) == 1, f"{len(told)} lines say so: {told}"
    assert "Traceback" not in said, said[-600:]
    return {"said": told[0].replace(str(bench.folder), "") if told else "", "found_s": round(bench.took, 1)}


def stalls(bench: Bench, number: int) -> Iterator[Case]:
    """One rank that raises, exits, hangs or is stopped, in six stages."""
    cases = [(stage, action) for action in ACTIONS for stage in STAGES]
    bench.random.shuffle(cases)
    for count, (stage, action) in enumerate(cases[:number]):
        fault = {"point": stage, "nth": 1 if stage == "export" else 2, "rank": count % 2, "action": action}
        yield (f"stall: rank {count % 2}, {action} in {stage}", _stall, (fault,))


def _stall(bench: Bench, name: str, fault: Entry) -> Entry:
    limit = STALL_S + (0 if fault["action"] in ("raise", "exit") else 60 * STALL_MINUTES)
    settings = [f"--run.stall_minutes={STALL_MINUTES}", "--checkpoint.on_failure=stop"]
    with bench.ranks(name, *settings, fault=fault) as ranks:
        started(ranks)
        gone_s = bench.gone_after(limit)
        statuses = ranks.statuses()
    said = "".join(ranks.output)
    assert all(statuses), f"statuses {statuses}"
    assert re.search(rf"rank {fault['rank']}\b", said.partition("fault: ")[2].partition("\n")[2]), (
        f"the rank is not named: {said[-600:]}"
    )
    return _resumed(bench, name, gone_s)


def disk(bench: Bench, number: int) -> Iterator[Case]:
    """A separate file system, which is filled at a point of a run and emptied when the run has ended."""
    points = [("saving", 1), ("saving", 4), ("fsync", 3), ("fsync", 20), ("fsync", 45), ("rename", 9)]
    points += [("logging", 2), ("logging", 5), ("rollouts", 3), ("export", 1)]
    for point, nth in points[:number]:
        fault = {"point": point, "nth": nth, "rank": 0, "action": "disk full"}
        yield f"disk: full at {point} {nth}", _full, (fault,)


def _full(bench: Bench, name: str, fault: Entry) -> Entry:
    folder = bench.folder / name
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200m", "tmpfs", folder], check=True)
    try:
        status, said = bench.run(name, fault=fault)
        assert "Traceback" not in said, said[-900:]
        assert "No space left on device" in said, said[-600:]
        told = [line for line in said.splitlines() if "No space left" in line]
        (folder / "junk").unlink()
        entry = {"status": status, "said": told[0].replace(str(bench.folder), ""), "steps_before": bench.lines(name)}
        bench.same(name, *(bench.run(name) if status else (status, said)))
        return entry
    finally:
        subprocess.run(["umount", "-l", folder], check=True)


def worlds(bench: Bench, number: int) -> Iterator[Case]:
    """Another number of ranks, another ZeRO stage."""
    cases = [(2, 3, 1, 3), (1, 3, 2, 3), (2, 3, 3, 3), (2, 3, 2, 2), (2, 3, 1, 1), (2, 2, 2, 3)]
    for before, stage, after, new_stage in cases[:number]:
        case = f"worlds: {before} ranks at stage {stage} to {after} at stage {new_stage}"
        yield case, _reshaped, ((before, stage), (after, new_stage))


def _reshaped(bench: Bench, name: str, first: tuple[int, int], second: tuple[int, int]) -> Entry:
    bench.run(name, f"--engine.zero_stage={first[1]}", world=first[0], fault=FOUR_STEPS)
    status, said = bench.run(name, f"--engine.zero_stage={second[1]}", world=second[0])
    ours, worst = bench.finished(name, status, said), 0.0
    assert ours["steps"] == bench.whole["steps"], ours["steps"]
    for step in ours["steps"]:
        mine, theirs = ours[f"metrics of step {step}"], bench.whole[f"metrics of step {step}"]
        worst = max(worst, abs(mine.get("policy/loss", 0.0) - theirs.get("policy/loss", 0.0)))
    assert worst <= 1e-5, f"losses differ by {worst:.1e}"
    return {"loss_difference": worst}


def poison(bench: Bench, number: int) -> Iterator[Case]:
    """NaN on one rank, from the third step on."""
    for what in ("loss", "gradient", "reward", "weight")[:number]:
        fault = {"poison": what, "step": 3, "rank": 1}
        yield (f"poison: NaN in the {what} of rank 1", _poisoned, (fault,))


def _poisoned(bench: Bench, name: str, fault: Entry) -> Entry:
    with bench.ranks(name, "--guard.patience=1", "--scoring.max_failed_frac=0.25", fault=fault) as ranks:
        ranks.wait(300)
        gone_s = bench.gone_after(GRACE_S)
        statuses = ranks.statuses()
    said = "".join(ranks.output)
    assert all(statuses) and "Traceback" not in said, f"{statuses}: {said[-900:]}"
    return {"said": said.strip().splitlines()[-1].replace(str(bench.folder), ""), **_resumed(bench, name, gone_s)}


PARTS: dict[str, tuple[Callable[[Bench, int], Iterator[Case]], int]] = {
    **{"kills": (kills, 60), "writes": (writes, 30)},
    **{"signals": (signals, 20), "corruptions": (corruptions, 999), "stalls": (stalls, 30)},
    **{"disk": (disk, 10), "worlds": (worlds, 6), "poison": (poison, 4)},
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen cases; the status is 1 if one did not pass."""
    parser = parser_of(__doc__)
    for name, (_, number) in PARTS.items():
        parser.add_argument(f"--{name}", type=int, help=f"cases; {number} where no number is given for any")
    parser.add_argument("--seed", type=int, default=0)
    options = vars(parser.parse_args(arguments))
    chosen = {name: options[name] for name in PARTS if options[name] is not None}
    chosen = chosen or {name: number for name, (_, number) in PARTS.items()}
    result: dict[str, Any] = {name: [] for name in PARTS}
    with tempfile.TemporaryDirectory() as folder:
        bench = Bench(Path(folder).resolve(), options["seed"])
        print(f"the whole run takes {bench.seconds:.1f} s", flush=True)
        for name, number in chosen.items():
            result[name] = [tried(bench, *case) for case in PARTS[name][0](bench, number)]
    entries = [entry for name in PARTS for entry in result[name]]
    passed = sum(entry["passed"] for entry in entries)
    print("\n".join(f"{n}: {sum(e['passed'] for e in result[n])} of {len(result[n])}" for n in PARTS if result[n]))
    result["machine"] = machine()
    save(options["json"], result)
    return int(passed < len(entries))


if __name__ == "__main__":
    sys.exit(main())
