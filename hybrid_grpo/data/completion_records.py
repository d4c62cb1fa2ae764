"""Completions as JSON: in the journal, and in a checkpoint if they are carried on."""

from base64 import b64decode, b64encode
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

import numpy as np

from hybrid_grpo.data.completion import Completion
from hybrid_grpo.data.episodes import Episode, Part
from hybrid_grpo.data.picture import Picture
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.support import SamplingMask

KINDS = (SamplingMask, Routing)
"""The sidecars that the sampler makes."""


def record_of(completion: Completion) -> dict[str, Any]:
    """Return all of a completion that the policy sampled, as plain data."""
    row: dict[str, Any] = {
        "tokens": _encoded(np.array(completion.token_ids, np.int32)),
        "logp": _encoded(np.array(completion.logp, np.float64)), "finish": completion.finish, "text": completion.text,
    }  # fmt: skip
    row |= {each.name: list(map(_encoded, each.arrays())) for each in completion.sidecars}
    kept = {name: name for name in ("messages", "calls", "carried", "histories")} | {"given": "observations"}
    row |= {name: value for name, field in kept.items() if (value := getattr(completion, field))}
    if not completion.learned:
        row["learned"] = False
    if completion.pictures:
        row["pictures"] = [{**vars(p), "data": p.data and b64encode(p.data).decode()} for p in completion.pictures]
    return row if completion.episode is None else {**row, "episode": asdict(completion.episode)}


def completion_of(row: Mapping[str, Any]) -> Completion:
    """Return the completion of a record. Raises ValueError, KeyError or TypeError if it is malformed."""
    episode = row.get("episode")
    if episode is not None:
        steps = tuple((end, reward) for end, reward in episode["steps"])
        parts = tuple(Part(**{**part, "spans": tuple(map(tuple, part["spans"]))}) for part in episode.get("parts", ()))
        chats = tuple(map(tuple, episode.get("chats", ())))
        episode = Episode(**{**episode, "steps": steps, "parts": parts, "chats": chats})
    shown = row.get("pictures", ())
    pictures = [{**p, "data": p["data"] and b64decode(p["data"]), "size": tuple(p["size"])} for p in shown]
    return Completion(
        token_ids=_decoded(row["tokens"]).tolist(), logp=_decoded(row["logp"]).tolist(), finish=row["finish"],
        text=row["text"], observations=tuple((place, ids) for place, ids in row.get("given", ())),
        messages=tuple(row.get("messages", ())), pictures=tuple(Picture(**picture) for picture in pictures),
        episode=episode, calls=tuple((name, has_failed) for name, has_failed in row.get("calls", ())),
        sidecars=tuple(kind(*map(_decoded, row[kind.name])) for kind in KINDS if kind.name in row),
        carried=tuple(row.get("carried", ())), histories=tuple(row.get("histories", ())),
        learned=row.get("learned", True),
    )  # fmt: skip


def _encoded(array: np.ndarray) -> list[Any]:
    return [array.dtype.str, array.shape, b64encode(array.tobytes()).decode()]


def _decoded(record: list[Any]) -> np.ndarray:
    dtype, shape, text = record
    return np.frombuffer(b64decode(text), dtype).reshape(shape).copy()
