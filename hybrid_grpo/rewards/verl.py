"""verl's conventions for reward functions, adapted to TRL's.

compute_score(data_source, solution_str, ground_truth, extra_info) -> float | {"score": float, ...}
compute_score(data_sources, solution_strs, ground_truths, extra_infos) -> a list of such results
"""

import asyncio
from collections.abc import Callable
from typing import Any

from hybrid_grpo.rewards.rules import completion_texts

_PLURALS = {name: f"{name}s" for name in ("data_source", "solution_str", "ground_truth", "extra_info")}


class AdapterError(Exception):
    """A row, or a function's result, breaks verl's convention. The message continues the name of the function."""


def columns_of(parameters: set[str]) -> set[str]:
    """Return parameters by the names of the columns that they receive, which are singular in both conventions."""
    return {name.removesuffix("s") if name in _PLURALS.values() else name for name in parameters}


def adapted(compute_score: Callable[..., Any], parameters: set[str], takes_any: bool, is_async: bool) -> Any:
    """Return a function in TRL's convention that calls one with these `parameters`, in either of verl's conventions."""
    in_batches = "solution_strs" in parameters

    def function(completions: Any, log_extra: Any, **columns: Any) -> Any:
        unknown = [None] * len(completions)
        columns = {"data_source": unknown, "extra_info": unknown, **columns}
        columns["solution_str"] = completion_texts(completions)
        if "ground_truth" not in columns:
            columns["ground_truth"] = list(map(_ground_truth, columns["reward_model"]))
        if in_batches:
            columns = {_PLURALS.get(name, name): column for name, column in columns.items()}
        given = {name: c for name, c in columns.items() if name in parameters or (takes_any and name != "reward_model")}
        if in_batches:
            results = compute_score(**given)
        else:
            rows = zip(*given.values(), strict=True)
            results = [compute_score(**dict(zip(given, row, strict=True))) for row in rows]
        return awaited(results, log_extra) if is_async else finished(results, log_extra)

    async def awaited(results: Any, log_extra: Any) -> Any:
        return finished(await (results if in_batches else asyncio.gather(*results)), log_extra)

    def finished(results: Any, log_extra: Any) -> Any:
        results = results.tolist() if hasattr(results, "tolist") else results
        if not isinstance(results, list | tuple):
            return results
        details = [result if isinstance(result, dict) else {"score": result} for result in results]
        if any("score" not in detail for detail in details):
            raise AdapterError("returned a dictionary without score: its keys are " + ", ".join(map(str, details[0])))
        for name in {name: None for detail in details for name in detail if name != "score"}:
            log_extra(name, [detail.get(name) for detail in details])
        return [detail["score"] for detail in details]

    return function


def _ground_truth(model: Any) -> Any:
    """Return the answer in a row's `reward_model`."""
    if isinstance(model, dict) and "ground_truth" in model:
        return model["ground_truth"]
    raise AdapterError(f"was not called: the row's reward_model is {model!r:.80}, which has no ground_truth")
