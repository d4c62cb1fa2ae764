"""Writes a run's metrics and rollouts to metrics.jsonl, details.jsonl, rollouts/, the console, and wandb.

Rank 0 writes everything and the other ranks send it their rollouts, so no shared file system is needed. `meter.py`
decides how the metrics are reduced across ranks.
"""

from pathlib import Path
from typing import Any, Self

from torch import Tensor

from hybrid_grpo.config import LogConfig
from hybrid_grpo.config.errors import RunInterrupted
from hybrid_grpo.data.batch import Rollout, Scores
from hybrid_grpo.distributed import ranks
from hybrid_grpo.records import thumbnails
from hybrid_grpo.records.alarm_records import ALARMS_FILE
from hybrid_grpo.records.alarms.alarms import RollBack
from hybrid_grpo.records.console import ConsoleSink, NotebookSink, display_for
from hybrid_grpo.records.files import TRACE_FILE, as_json, cut_lines, replace_text, rollout_files
from hybrid_grpo.records.tokens import TokenText, joined, token_table, write_table
from hybrid_grpo.records.trackers.process import TrackerProcess, start_tracker
from hybrid_grpo.records.write_failures import one_line

_FINISH_SECONDS, _STOP_SECONDS = 60.0, 8.0
"""How long wandb may take at the end of a run, and how long after a request to stop, when time is short."""


class Log:
    """All outputs of a run. Every rank has a `Log`, but only rank 0 writes."""

    def __init__(
        self, config: LogConfig, run_dir: Path, steps: int, done: int = -1, settings: dict[str, Any] | None = None,
        tokenizer: Any = None,
    ) -> None:  # fmt: skip
        """
        Args:
            steps: the last step of the run.
            done: last step to keep when a run resumes; what was written for later steps is removed. -1: a new run.
            settings: the configuration of the run, for wandb.
            tokenizer: turns tokens into text if `log.tokens` is set; if it is None, no tokens are written.
        """
        self._every, self._steps, self._rollouts = config.rollouts_every, steps, run_dir / "rollouts"
        self._text = TokenText(tokenizer) if tokenizer is not None and config.tokens else None
        self._trace = run_dir / TRACE_FILE
        self._shown: set[str] = set()
        """Copies of pictures that this rank has made."""
        self._sinks: list[JsonlSink | ConsoleSink | NotebookSink] = []
        self._tracker: TrackerProcess | None = None
        if ranks.rank() != 0:
            return
        with one_line(run_dir):
            run_dir.mkdir(parents=True, exist_ok=True)
            for kind in ("jsonl", "parquet"):
                for step, path in rollout_files(self._rollouts, kind).items():
                    if step > done:
                        path.unlink()
            for name in (ALARMS_FILE, TRACE_FILE):
                if kept := cut_lines(run_dir / name, done):
                    print(f"WARNING: {run_dir / name}: a line cannot be read; the original is kept as {kept.name}")
            self._sinks = [JsonlSink(run_dir / "metrics.jsonl", done)]
        self._tracker = start_tracker(config, run_dir, settings or {}, done)
        self._sinks += [display_for(steps, done)]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        stopped = kind is not None and issubclass(kind, RunInterrupted)
        goes_on = kind is None or issubclass(kind, RunInterrupted | RollBack)
        self.close(_STOP_SECONDS if stopped else _FINISH_SECONDS, failed=not goes_on)

    def write(self, step: int, values: dict[str, float]) -> None:
        """Write a step's metrics, once per step."""
        with one_line(self._rollouts.parent):
            for sink in self._sinks:
                sink.write(step, values)
        if self._tracker is not None:
            self._tracker.look()

    def write_rollouts(
        self, step: int, rollout: Rollout, scores: Scores, advantages_B: Tensor, advantages_BT: Tensor | None = None,
        always: bool = False,
    ) -> None:  # fmt: skip
        """Write all ranks' completions in the first, last and every n-th step, or in any if `always`. Collective."""
        due = self._every and (step % self._every == 0 or step in (1, self._steps))
        if not (due or always):
            return
        tables: list[Any] | None = None
        if self._text is not None:
            first_group = ranks.rank() * len(rollout.prompts)
            tables = ranks.gather_objects(token_table(rollout, first_group, advantages_BT, self._text))
        shown = thumbnails.copies(rollout.pictures, self._shown)
        parts = ranks.gather_objects((rollout_lines(step, rollout, scores, advantages_B), shown))
        if parts is None:
            return
        lines = [line for part, _ in parts for line in part]
        with one_line(self._rollouts.parent):
            for _, made in parts:
                thumbnails.write(self._rollouts.parent, made)
            self._rollouts.mkdir(parents=True, exist_ok=True)
            if tables is not None:
                # Before the text file, by which readers find the step.
                write_table(self._rollouts / f"step_{step:06d}.parquet", joined(tables))
            replace_text(self._rollouts / f"step_{step:06d}.jsonl", "".join(f"{line}\n" for line in lines))

    def write_trace(self, step: int, own: list[Any] | None) -> None:
        """Write the step's trace, of every rank's `own` stages; if `own` is None, do nothing. Collective."""
        stages = None if own is None else ranks.gather_objects(own)
        if stages is not None:
            line = as_json({"step": step, "stages": stages}, separators=(",", ":"))
            with one_line(self._trace.parent), self._trace.open("a", encoding="utf-8") as file:
                print(line, file=file)

    def close(self, patience_s: float = _FINISH_SECONDS, failed: bool = False) -> None:
        """Close the outputs. wandb has `patience_s` seconds to finish; the files need no time."""
        sinks, tracker, self._sinks, self._tracker = self._sinks, self._tracker, [], None
        with one_line(self._rollouts.parent):
            for sink in sinks:
                sink.close()
        if tracker is not None:
            tracker.ask(failed)
            tracker.close(patience_s)


class JsonlSink:
    """Writes metrics.jsonl: one flat JSON object per step, readable at any moment. NaN and infinity become null."""

    def __init__(self, path: Path, done: int = -1) -> None:
        """Open the file, after removing lines of steps after `done` and a line that a crash left incomplete."""
        cut_lines(path, done)
        self._last, self._file = done, path.open("a", encoding="utf-8")

    def write(self, step: int, values: dict[str, float]) -> None:
        assert step > self._last, f"step {step} is written after step {self._last}"
        self._last = step
        print(as_json({"step": step, **values}), file=self._file, flush=True)

    def close(self) -> None:
        self._file.close()


def rollout_lines(step: int, rollout: Rollout, scores: Scores, advantages_B: Tensor) -> list[str]:
    """Return one JSON object per completion of this rank, [B]; groups are numbered across all ranks."""
    first_group = ranks.rank() * len(rollout.prompts)
    rewards = {name: reward_B.tolist() for name, reward_B in scores.by_function.items()}
    rows = zip(rollout.row_prompts, rollout.completions, scores.reward_B.tolist(), advantages_B.tolist(), strict=True)
    return [
        as_json({
            "step": step, "group": first_group + row // rollout.num_generations,
            "sample": row % rollout.num_generations, "prompt_id": prompt.id,
            **({"source": prompt.source} if prompt.source else {}), "prompt": prompt.text,
            **(
                {"pictures": list(map(thumbnails.described, seen))}
                if (seen := (*prompt.pictures, *completion.pictures))
                else {}
            ),
            **({"writer": completion.writer} if completion.writer else {}),
            **({"policies": completion.policies} if completion.carried else {}), "completion": completion.text,
            **({"messages": completion.messages} if completion.messages else {}),
            **({"chats": of.chats} if (of := completion.episode) and of.chats else {}),
            "reward": reward, "rewards": {name: values[row] for name, values in rewards.items()},
            "failed": {name: why[row] for name, why in scores.failures.items() if why[row] is not None},
            **({} if scores.steps is None else {"steps": scores.steps[row]}),
            "extra": {name: stored[row] for name, stored in scores.extra.items()}, "advantage": advantage,
            "length": len(completion.token_ids), "finish": completion.finish, "columns": prompt.columns,
        }, ensure_ascii=False)
        for row, (prompt, completion, reward, advantage) in enumerate(rows)
    ]  # fmt: skip
