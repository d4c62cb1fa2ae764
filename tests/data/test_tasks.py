"""Ready-made tasks: their rows, prompts and rewards, and how they become settings."""

import asyncio
import json
import sys
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from unittest.mock import AsyncMock, Mock

import forks
import pytest
import yaml
from char_tokenizer import IDS, TEMPLATE, char_tokenizer
from reward_helpers import completion
from tiny_models import build, tiny_config

from hybrid_grpo.commands.pairs import read_pairs
from hybrid_grpo.config import DataConfig, RewardConfig, SftConfig, TrainConfig
from hybrid_grpo.config.checks import check_sft
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.parsing import parse
from hybrid_grpo.config.tasks import task_settings
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.prompts import read_prompts
from hybrid_grpo.data.sources import evaluation_source, read_rows, training_source
from hybrid_grpo.data.tasks import TASKS, load_task
from hybrid_grpo.data.tasks.verifiers import play
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.scorer import Rewards

GSM8K = {
    "question": "A box has 12 pens. Half of them are blue. How many are blue?",
    "answer": "Half of 12 is 12 / 2 = <<12/2=6>>6.\n#### 6",
}
MATH = {
    "problem": "What is $\\frac{1}{2} + \\frac{1}{4}$?",
    "type": "Prealgebra",
    "solution": "Over a common denominator it is $\\frac{2}{4} + \\frac{1}{4} = \\boxed{\\frac{3}{4}}$.",
}
MATH_500 = {
    "problem": "How many positive whole numbers divide $9$?",
    "solution": "They are 1, 3 and 9, so there are $\\boxed{3}$.",
    "answer": "3",
    "level": 1,
}
ARC = {
    "question": "Which of these is a planet?",
    "choices": {"text": ["Moon", "Mars", "Sun"], "label": ["1", "2", "3"]},
    "answerKey": "2",
}
MMLU = {"question": "What is 2 + 2?", "subject": "algebra", "choices": ["3", "4", "5", "1"], "answer": 1}
MBPP = {
    "task_id": 1, "text": "Write a function to double a number.", "code": "def double(n):\r\n  return 2 * n",
    "test_list": ["assert double(2) == 4", "assert double(0) == 0", "assert double(-1) == -2"], "test_setup_code": "",
}  # fmt: skip
RIGHT_AND_WRONG = {
    "gsm8k": (GSM8K, "Half, so #### 6", "#### 7"),
    "math": (MATH, r"So \boxed{0.75}", r"\boxed{\frac{4}{3}}"),
    "math 500": (MATH_500, r"\boxed{3}", r"\boxed{2}"),
    "multiple_choice": (ARC, "The answer is (B)", "The answer is (A)"),
    "multiple_choice mmlu": (MMLU, "The answer is (B)", "The answer is (D)"),
    "code": (
        MBPP,
        "```python\ndef double(n):\n    return n + n\n```",
        "```python\ndef double(n):\n    return n + 3\n```",
    ),
    "letters": ({"word": "dcab"}, "abcd", "dabc"),
}


def jsonl(path: Path, *rows: dict) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def settings(*arguments: str, cls=TrainConfig):
    return parse(cls, list(arguments), "train").config


@pytest.mark.parametrize("name", RIGHT_AND_WRONG)
@pytest.mark.process
def test_a_right_completion_is_worth_1_and_a_wrong_one_0(name, tmp_path):
    row, right, wrong = RIGHT_AND_WRONG[name]
    path = jsonl(tmp_path / "rows.jsonl", row, row)
    config = settings("--data.task", name.split()[0], "--data.path", str(path))
    read = read_rows(training_source(config.data))
    assert (
        len(read) == 2 and read[0].items() >= {k: v for k, v in row.items() if k not in ("answer", "choices")}.items()
    )
    prompts = [Prompt(0, one["prompt"], [], {k: v for k, v in one.items() if k != "prompt"}) for one in read]
    texts = [right, wrong, read[0]["completion"]] if "completion" in read[0] else [right, wrong]
    rewards = Rewards(load_rewards(config.rewards[:1]))
    scores = rewards.score([prompts[0]] * len(texts), [completion(text) for text in texts])
    assert scores.reward_B.tolist() == [1.0, 0.0, 1.0][: len(texts)]


def test_the_prompts_of_the_data_sets():
    read = {name: TASKS[name.split()[0]].row(row)["prompt"] for name, (row, _, _) in RIGHT_AND_WRONG.items()}
    assert read["gsm8k"].startswith(GSM8K["question"] + "\n\n") and '"####"' in read["gsm8k"]
    assert read["math"].startswith(MATH["problem"]) and r"\boxed{}" in read["math"]
    assert "\n\nA. Moon\nB. Mars\nC. Sun\n\n" in read["multiple_choice"]
    assert MBPP["test_list"][0] in read["code"] and MBPP["test_list"][1] not in read["code"]
    assert read["letters"] == "dcab="


def test_code_reads_setup_code_and_tests_of_other_forms():
    row = {**MBPP, "test_setup_code": "x = 2"}
    assert TASKS["code"].row(row)["tests"] == ["x = 2", *MBPP["test_list"]]
    tests = {"inputs": ["1\n"], "outputs": ["2\n"]}
    for columns in (("prompt", "tests"), ("question", "input_output"), ("text", "test")):
        made = TASKS["code"].row(dict(zip(columns, ("Read n, print 2 n.", tests), strict=True)))
        assert made["tests"] == tests and "1\n" not in made["prompt"] and "completion" not in made


@pytest.mark.parametrize("name", ["letters", "gym/chain_sum,max_terms=2,max_digits=3"])
def test_made_rows_are_the_same_every_time_and_split_cleanly(name):
    data = DataConfig(task=name, limit=300, eval_split="test", eval_limit=100)
    train, held_out = read_rows(training_source(data)), read_rows(evaluation_source(data))
    assert train == read_rows(training_source(data)) and train[:7] == read_rows(training_source(replace(data, limit=7)))
    prompts = {row["prompt"] for row in train}
    assert len(prompts) == 300 and len({row["prompt"] for row in held_out} - prompts) == 100
    # Their own solutions are right.
    rewards = settings("--data.task", name).rewards
    columns = [Prompt(i, row["prompt"], [], row) for i, row in enumerate(train)]
    scores = Rewards(load_rewards(rewards)).score(columns, [completion(row["answer"]) for row in train])
    assert scores.reward_B.tolist() == [float(len(rewards))] * 300


def test_a_task_is_resolved_and_what_the_user_says_wins(tmp_path):
    config = settings("--data.task", "gsm8k")
    assert config.data == DataConfig(
        task="gsm8k", path="openai/gsm8k", subset="main", eval_split="test", chat_template="always"
    )
    assert config.rewards == [RewardConfig("numeric_answer")]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        "data: {task: gsm8k, subset: socratic, chat_template: never}\nrewards: [{function: exact_match}]\n"
    )
    config = settings("--config", str(recipe), "--data.eval_split", "train")
    assert (config.data.subset, config.data.chat_template, config.data.eval_split) == ("socratic", "never", "train")
    assert config.rewards == [RewardConfig("exact_match")]
    # A source of one's own takes nothing of the task's: it has other splits.
    own = settings("--data.task", "math", "--data.path", "mine.jsonl").data
    assert (own.subset, own.eval_path, own.eval_split) == (None, None, None)
    held_out = settings("--data.task", "gsm8k", "--data.eval_path", "mine.jsonl").data
    assert (held_out.subset, held_out.eval_split) == ("main", None)


@pytest.mark.parametrize("task", TASKS)
def test_the_resolved_recipe_is_the_same_run(task, tmp_path):
    parsed = parse(TrainConfig, ["--data.task", task, "--data.limit", "9"], "train")
    recipe = tmp_path / "config.yaml"
    recipe.write_text(parsed.yaml)
    assert parsed.config.rewards and settings("--config", str(recipe)) == parsed.config


OWN = """
from dataclasses import replace
from operator import itemgetter
from hybrid_grpo.data.tasks import TASKS, TaskRecipe, text

def shout(completions, answer):
    return [float(c == a) for c, a in zip(completions, answer)]

def row(row):
    return {"prompt": text(row, "say") + "!", "answer": text(row, "say").upper()}

settings = {
    "data": {"path": "mine.jsonl", "chat_template": "always"},
    "rewards": [{"function": ":shout", "weight": 2.0}],
    "eval": {"threshold": 0.5},
    "rollout": {"max_completion_tokens": 7},
}
shouting = TaskRecipe(row, settings)
shorter = replace(TASKS["letters"], settings={"data": {"limit": 3}, "rewards": [":shout", "exact_match"]})

number = 3
fragile = replace(shouting, row=lambda row: {"prompt": row["say"][9]})
odd = replace(shouting, row=lambda row: "text")
absent = replace(shouting, row=itemgetter("nothing"))
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    jsonl(tmp_path / "mine.jsonl", {"say": "ho", "other": 1}, {"say": "hey", "other": 2})
    (tmp_path / "my_task.py").write_text(OWN)
    (tmp_path / "broken.py").write_text("raise RuntimeError('no luck')")
    return tmp_path


@pytest.mark.process
def test_a_task_of_one_s_own(own):
    config = settings("--data.task", "my_task.py:shouting", "--data.chat_template", "never")
    assert config.rewards == [RewardConfig("my_task.py:shout", weight=2.0)] and config.eval.threshold == 0.5
    prompts, _ = read_prompts(config.data, char_tokenizer())
    assert [p.text for p in prompts] == ["ho!", "hey!"]
    assert prompts[1].columns == {"say": "hey", "other": 2, "answer": "HEY"}
    scores = Rewards(load_rewards(config.rewards)).score(prompts, [completion("HO"), completion("hey")])
    assert scores.reward_B.tolist() == [2.0, 0.0]
    assert config.rollout.max_completion_tokens == 7 and config.data.chat_template == "never"
    shorter = settings("--data.task", "my_task.py:shorter")
    assert shorter.data.limit == 3 and shorter.rewards == list(map(RewardConfig, ("my_task.py:shout", "exact_match")))


def test_a_function_that_reads_rows_is_a_task(own):
    config = settings("--data.task", "my_task.py:row", "--data.path", "mine.jsonl", "--rewards", "my_task.py:shout")
    assert [prompt.text for prompt in read_prompts(config.data, char_tokenizer())[0]] == ["ho!", "hey!"]
    assert config.rewards == [RewardConfig("my_task.py:shout")]


@pytest.mark.parametrize("task, says", [
    ("my_task.py:shoutin", "data.task my_task.py:shoutin: my_task.py has no shoutin: did you mean shouting?"),
    ("my_task.py:number", "data.task my_task.py:number is an int: give a TaskRecipe"),
    ("broken.py:task", "importing broken.py raised RuntimeError: no luck (broken.py:1)"),
    ("no_such_module:task", "there is no module no_such_module"),
    ("countdown", "data.task countdown: there is no such task: did you mean gym/countdown?"),
])  # fmt: skip
def test_a_task_that_is_none(own, task, says):
    with pytest.raises(UserError) as caught:
        settings("--data.task", task)
    assert says in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("task, row, says", [
    ("gsm8k", {"question": "a"}, "has no answer: its columns are question"),
    ("gsm8k", {"question": 3, "answer": "a"}, "has question 3, where text is expected"),
    ("math", {"problem": "a", "solution": "b"}, r"has no answer, and its solution has none in \boxed{}"),
    ("multiple_choice", {**MMLU, "answer": 4}, "has answer 4, which is not a label, index or text of its 4"),
    ("multiple_choice", {**MMLU, "choices": "ab"}, "has choices 'ab', where a list of 2 to 26 texts is expected"),
    ("code", {"prompt": "a"}, "has no tests or test_list or test or input_output: its columns are task_id, "),
    ("my_task.py:fragile", {"say": "ho"}, "reading it raised IndexError: string index out of range (my_task.py:"),
    ("my_task.py:absent", {"say": "ho"}, "reading it raised KeyError: 'nothing'"),
    ("my_task.py:odd", {"say": "ho"}, "became 'text': return a dict with a prompt"),
])  # fmt: skip
def test_a_row_that_cannot_be_read_is_named(own, task, row, says):
    good = next((row for name, (row, _, _) in RIGHT_AND_WRONG.items() if name == task), row)
    path = jsonl(own / "rows.jsonl", good, row)
    with pytest.raises(UserError) as caught:
        read_rows(training_source(DataConfig(task=task, path=str(path))))
    number = 0 if good == row else 1
    assert str(caught.value).startswith(f"data.task {task}: row {number} (from 0) of {path} [train] {says}"[:60])
    assert says in str(caught.value)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A tiny model with a tokenizer of characters, which knows neither = nor brackets."""
    folder = tmp_path_factory.mktemp("model")
    tokenizer = char_tokenizer(TEMPLATE)
    config = tiny_config("qwen2", vocab_size=len(IDS), eos_token_id=tokenizer.eos_token_id)
    build(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def test_made_rows_want_a_split_and_a_number_and_no_subset():
    with pytest.raises(UserError, match=r"data.subset big: data.task letters has none: leave it out"):
        read_rows(training_source(DataConfig(task="letters", subset="big", limit=3)))
    with pytest.raises(UserError, match=r"data.eval_split dev: data.task letters has train and test"):
        read_rows(evaluation_source(DataConfig(task="letters", eval_split="dev", eval_limit=3)))
    with pytest.raises(UserError, match=r"data.limit is not set, and data.task letters makes rows without end"):
        read_rows(training_source(DataConfig(task="letters")))


def test_the_supervised_stage_learns_the_solutions_of_a_task(model):
    config = settings("--policy.model", str(model), "--data.task", "letters", "--data.limit", "5", cls=SftConfig)
    check_sft(replace(config, sft=replace(config.sft, batch_size=1)), 1)
    pairs, report = read_pairs(config.data, char_tokenizer(), 16)
    tokenizer = char_tokenizer()
    solutions = ["".join(sorted(pair.prompt.text[:-1])) for pair in pairs]
    assert [tokenizer.decode(pair.completion_ids).replace(" ", "") for pair in pairs] == [
        s + "<eos>" for s in solutions
    ]
    assert report.startswith("task letters [train]: 5 of 5 rows kept")


@pytest.mark.parametrize("task", ["letters", "gym/spell_backward,max_word_len=4"])
@pytest.mark.process
def test_a_run_of_a_task_starts_and_steps(task, model, tmp_path):
    arguments = [
        *(f"--policy.model={model}", "--policy.dtype=float32", "--engine.zero_stage=0", "--log.wandb=disabled"),
        *("--data.task", task, "--data.limit", "8", "--data.eval_limit", "4"),
        *("--rollout.prompts_per_step", "4", "--rollout.num_generations", "2", "--rollout.max_completion_tokens", "6"),
    ]
    for command, more in (("plan", []), ("train", ["--run.steps=2", f"--run.dir={tmp_path}", "--run.name=run"])):
        done = forks.run("-m", "hybrid_grpo", command, *arguments, *more, cwd=tmp_path)
        assert done.status == 0, done.err
    metrics = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics if "policy/loss" in row] == [1, 2]
    assert "eval/heldout/accuracy" in metrics[0] and metrics[-1]["progress/completions"] == 16
    stored = yaml.safe_load((tmp_path / "run" / "config.yaml").read_text())
    own = task_settings(task)["rewards"]
    assert stored["data"]["task"] == task and [r["function"] for r in stored["rewards"]] == [r["function"] for r in own]


def test_a_taskset_of_verifiers_is_a_task_that_its_environment_plays(monkeypatch):
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", None)
    with pytest.raises(UserError, match=r"pip install 'verifiers>=0.4,<0.5' uv"):
        load_task("verifiers/a")
    tasks = [Mock(data=Mock(prompt_text=k), with_data=lambda idx, k=k: Mock(key=f"key {k}")) for k in range(40)]
    traces = [Mock(reward=0.25, agent=Mock(trainable=trains)) for trains in (True, False, True)]
    episode = AsyncMock(return_value=Mock(ok=True, traces=traces))
    env = Mock(taskset=tasks, serving=nullcontext, run_episode=episode)
    loaders = Mock(load_environment=lambda config: env.configure_mock(config=config) or env, resolve_env_config=dict)
    monkeypatch.setitem(sys.modules, "verifiers.v1.utils.loaders", loaders)
    monkeypatch.setitem(sys.modules, "verifiers.v1.clients", Mock())
    name = "verifiers/a,n=2,agent.runtime.type=subprocess"
    assert settings("--data.task", name).rollout.agent.endswith("verifiers:play")
    train, held_out = ([row["index"] for row in load_task(name).made(part)] for part in (False, True))
    assert env.config == {"taskset": {"id": "a", "n": 2}, "agent": {"runtime": {"type": "subprocess"}}}
    assert sorted(train + held_out) == [*range(40)] and 0 < len(held_out) < len(train)
    client = Mock(models=Mock(list=AsyncMock(return_value=Mock(data=[Mock(root="folder")]))))
    assert asyncio.run(play({"task": name, "index": 7}, client)) == 0.5 and episode.call_args[0][0] is tasks[7]
