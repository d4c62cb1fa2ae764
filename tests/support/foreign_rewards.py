"""Reward functions in the forms that TRL's and verl's documentation shows: they are not to be changed to run here."""

import asyncio
import os
import re


def longer_is_better(completion_ids, **kwargs):
    return [float(len(ids)) for ids in completion_ids]


def thinks_then_answers(completions, **kwargs):
    texts = [completion[0]["content"] for completion in completions]
    return [1.0 if re.match(r"^<think>.*?</think><answer>.*?</answer>$", text) else 0.0 for text in texts]


def boxed_equals(completions, ground_truth, **kwargs):
    found = [re.search(r"\\boxed\{(.*?)\}", completion) for completion in completions]
    return [1.0 if m and m.group(1) == gold else 0.0 for m, gold in zip(found, ground_truth, strict=True)]


def only_maths(prompts, completions, task, **kwargs):
    return [float("4" in c) if t == "math" else None for _, c, t in zip(prompts, completions, task, strict=True)]


async def slow_length(prompts, completions, **kwargs):
    await asyncio.sleep(0.01)
    return [float(len(c)) for c in completions]


def logs(completions, trainer_state, log_extra=None, log_metric=None, **kwargs):
    numbers = [re.sub(r"\D", "", completion) for completion in completions]
    if log_extra:
        log_extra("number", numbers)
    if log_metric:
        log_metric("mean", sum(map(int, numbers)) / len(numbers))
    state = trainer_state
    progress = f"{state.global_step}/{state.max_steps}, {state.epoch}/{state.num_train_epochs}"
    if log_extra:
        log_extra("progress", [progress] * len(completions))
    return [float(trainer_state.global_step)] * len(completions)


class ContainsKey:
    def __init__(self, variable="OPENAI_API_KEY"):
        self.variable = variable

    def __call__(self, completions, **kwargs):
        return [1.0 if os.environ[self.variable] in completion else 0.0 for completion in completions]


def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    if data_source != "openai/gsm8k":
        raise NotImplementedError(f"no reward for {data_source}")
    found = re.findall(r"#### (\-?[0-9\.\,]+)", solution_str)
    right = bool(found) and found[-1].replace(",", "") == ground_truth
    return {"score": 1.0 if right else 0.1 * bool(found), "acc": right, "split": extra_info["split"]}


def compute_score_plainly(solution_str, ground_truth, method="strict", format_score=0.0, score=1.0, **kwargs):
    assert method in ("strict", "flexible")
    numbers = re.findall(r"#### (\d+)" if method == "strict" else r"(\d+)", solution_str)
    return score if numbers and numbers[-1] == ground_truth else format_score


async def compute_score_async(data_source, solution_str, ground_truth, extra_info):
    await asyncio.sleep(0.01)
    return float(solution_str.endswith(ground_truth))


def compute_score_batch(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):
    rows = zip(data_sources, solution_strs, ground_truths, extra_infos, strict=True)
    return [
        {"score": float(solution.endswith(gold)) + bonus, "split": info["split"]} for _, solution, gold, info in rows
    ]


class NaiveRewardManager:
    def __init__(self, tokenizer, num_examine):
        self.tokenizer = tokenizer

    def __call__(self, data, return_dict=False):
        return data.batch["rm_scores"]
