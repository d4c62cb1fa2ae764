"""Shows a run in TensorBoard: `tensorboard --logdir RUNS` finds the event files in the run's folder."""

import json
import time
from bisect import bisect_left
from pathlib import Path
from typing import Any

from hybrid_grpo.config import LogConfig
from hybrid_grpo.records.trackers.steps import TrackedStep

_BINS = 30


class TensorboardTracker:
    """Writes event files to the folder `tensorboard` of the run, without using TensorFlow or torch."""

    def __init__(self, folder: Path, config: LogConfig, settings: dict[str, Any], resumes: bool) -> None:
        from tensorboard.compat.proto import event_pb2, summary_pb2
        from tensorboard.plugins.text.metadata import create_summary_metadata
        from tensorboard.summary.writer.event_file_writer import EventFileWriter
        from tensorboard.util import tensor_util

        self._event, self._summary = event_pb2, summary_pb2
        self._text_metadata, self._tensor = create_summary_metadata, tensor_util.make_tensor_proto
        self._resumes = resumes
        place = folder / "tensorboard"
        self._writer = EventFileWriter(str(place))
        text = json.dumps(settings, indent=2, ensure_ascii=False)
        self._add(0, [self._text("config", "\n".join(f"    {line}" for line in text.splitlines()))])
        self.greeting = f"tensorboard: tensorboard --logdir {folder.parent}"

    def write(self, step: TrackedStep) -> None:
        """Write the scalars and histograms of a step, and its samples and alarms as text."""
        if self._resumes:  # hides what an earlier attempt wrote from this step on
            self._resumes, start = False, self._event.SessionLog(status=self._event.SessionLog.START)
            self._writer.add_event(self._event.Event(step=step.step, session_log=start))
        values = [self._summary.Summary.Value(tag=name, simple_value=value) for name, value in step.values.items()]
        values += [self._histogram(name, numbers) for name, numbers in step.distributions.items()]
        values += [self._text("samples", "\n\n".join(_sample(*sample) for sample in step.samples))]
        values += [self._text("alarms", message) for message in step.alarms]
        values += [self._picture(f"pictures/{number}", path) for number, (path, _) in enumerate(step.pictures)]
        self._add(step.step, [value for value in values if value is not None])
        self._writer.flush()

    def _add(self, step: int, values: list[Any]) -> None:
        summary = self._summary.Summary(value=values)
        self._writer.add_event(self._event.Event(step=step, wall_time=time.time(), summary=summary))

    def _text(self, tag: str, markdown: str) -> Any:
        if not markdown:
            return None
        metadata = self._text_metadata(display_name=tag, description="")
        return self._summary.Summary.Value(tag=tag, metadata=metadata, tensor=self._tensor([markdown.encode()]))

    def _picture(self, tag: str, path: Path) -> Any:
        from PIL import Image

        with Image.open(path) as image:
            width, height = image.size
        picture = self._summary.Summary.Image(
            height=height, width=width, colorspace=3, encoded_image_string=path.read_bytes()
        )
        return self._summary.Summary.Value(tag=tag, image=picture)

    def _histogram(self, tag: str, numbers: list[float]) -> Any:
        low, high = min(numbers), max(numbers)
        limits = [low + (high - low) * edge / _BINS for edge in range(1, _BINS)] + [high] if high > low else [high]
        counts = [0] * len(limits)
        for number in numbers:
            counts[min(bisect_left(limits, number), len(limits) - 1)] += 1
        squares = sum(number * number for number in numbers)
        histogram = self._summary.HistogramProto(
            min=low,
            max=high,
            num=len(numbers),
            sum=sum(numbers),
            sum_squares=squares,
            bucket_limit=limits,
            bucket=counts,
        )
        return self._summary.Summary.Value(tag=tag, histo=histogram)

    def close(self, files: list[Path], failed: bool) -> None:
        self._writer.close()


def _sample(why: str, row: dict[str, Any]) -> str:
    prompt = row["prompt"] if isinstance(row["prompt"], str) else json.dumps(row["prompt"], ensure_ascii=False)
    head = f"**{why}**, group {row['group']}, reward {row['reward']}, {row['length']} tokens, {row['finish']}"
    body = "\n".join(f"    {line}" for line in [*prompt.splitlines(), "", *row["completion"].splitlines()])
    return f"{head}\n\n{body}"
