"""What `rewards` of a configuration may name, and what is said when it names nothing."""

import os
import pickle
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from foreign_rewards import longer_is_better
from math_verify import parse, verify
from reward_helpers import command_lines, in_time, isolated, rows, statuses

from hybrid_grpo.config import RewardConfig, ScoringConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.config.user_code import describe
from hybrid_grpo.distributed.workers.calls import call_inline
from hybrid_grpo.distributed.workers.pool import worker_count
from hybrid_grpo.rewards.functions import RewardFunction, load_function
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.rules import exact_match


def load(function: str, **fields: Any) -> RewardFunction:
    return load_function(RewardConfig(function, **fields), "rewards[1]")


def refusal(function: str, **fields: Any) -> str:
    with pytest.raises(UserError) as caught:
        load(function, **fields)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("rewards[1].")
    return message


@pytest.fixture
def rules(tmp_path: Path) -> Path:
    (tmp_path / "rules_sibling.py").write_text("BONUS = 2.0\n")
    (tmp_path / "rules.py").write_text(
        "from dataclasses import dataclass\n"
        "from rules_sibling import BONUS\n"
        "CONSTANT = 3\n"
        "@dataclass\n"
        "class Case:\n"
        "    text: str\n"
        "def bonus(completions, scale=1.0, **kwargs):\n"
        "    return [BONUS * scale for _ in completions]\n"
        "def strict(completions, answer):\n"
        "    return [1.0 for _ in completions]\n"
        "def _private():\n"
        "    pass\n"
    )
    return tmp_path / "rules.py"


def test_a_builtin_by_its_name() -> None:
    (reward,) = load_rewards([RewardConfig("exact_match", weight=0.5, name="right")])
    assert (reward.name, reward.weight, reward.interface.batch_size) == ("right", 0.5, "group")
    assert reward.interface.required == ["answer", "completions"] == reward.interface.accepted
    assert isinstance(reward.caller, partial) and reward.caller.func is call_inline


def test_a_function_of_a_file_with_its_sibling(rules: Path) -> None:
    path = list(sys.path)
    bonus, strict = load(f"{rules}:bonus", kwargs={"scale": 3}), load(f"{rules}:strict")
    assert bonus({"prompts": ["p"], "completions": ["c"]}) == [6.0]
    assert (bonus.name, bonus.interface.accepted, bonus.interface.required) == ("bonus", None, ["completions"])
    assert strict({"prompts": ["p"], "completions": ["c"], "answer": ["a"]}) == [1.0]
    assert sys.path == path


@pytest.mark.process
def test_it_is_the_same_function_in_a_worker(rules: Path) -> None:
    before = set(sys.modules)
    rewards = isolated(RewardConfig(f"{rules}:bonus", kwargs={"scale": 3}), RewardConfig(f"{rules}:strict"))
    assert rewards.score(*rows("a", answer=["a"])).reward_B.tolist() == [7.0]
    assert not {name for name in set(sys.modules) - before if "rules" in name}, "it is not imported here"


@pytest.mark.process
def test_a_relative_path_and_a_module_are_found_in_the_working_folder(rules: Path, monkeypatch) -> None:
    monkeypatch.chdir(rules.parent)
    by_path, absolute = load("rules.py:bonus"), load(f"{rules}:bonus")
    assert by_path.function.func is absolute.function.func  # type: ignore[attr-defined] # one file is one module
    (rules.parent / "rules_as_module.py").write_text("def one(completions): return [1.0] * len(completions)\n")
    assert load("rules_as_module:one")({"completions": ["a", "b"]}) == [1.0, 1.0]
    assert isolated(RewardConfig("rules_as_module:one")).score(*rows("a")).reward_B.tolist() == [1.0]


def test_what_a_file_defines_can_be_pickled(rules: Path) -> None:
    bonus = load(f"{rules}:bonus").function.func  # type: ignore[attr-defined]
    case = bonus.__globals__["Case"]("x")
    assert pickle.loads(pickle.dumps(case)) == case
    assert pickle.loads(pickle.dumps(bonus)) is bonus


@pytest.mark.parametrize("function, said", [
    ("exact_mach", "exact_mach is not a built-in: did you mean exact_match?"),
    ("rules", "path/to/file.py:function"),
    ("zzz", "known are exact_match, numeric_answer"),
    ("countdown", "is not a built-in: data.task gym/countdown has the puzzles"),
    ("/absent.py:f", "there is no file /absent.py"),
    ("absent_package.rules:f", "there is no module absent_package: install it"),
    ("hybrid_grpo.absent:f", "there is no module hybrid_grpo.absent"),
    ("builtins:max", "wrap it in a `def`"),
])  # fmt: skip
def test_what_there_is_not_is_named(function: str, said: str) -> None:
    assert said in refusal(function)


def test_a_file_without_a_function_s_name(rules: Path) -> None:
    wanted = f"name the function in it, {rules}:bonus, or strict in place of bonus"
    assert refusal(str(rules)) == f"rewards[1].function {rules} is a file: {wanted}"


def test_no_such_function(rules: Path) -> None:
    assert "bonsu does not exist in" in refusal(f"{rules}:bonsu")
    assert "did you mean bonus?" in refusal(f"{rules}:bonsu")
    assert refusal(f"{rules}:zzz").endswith("known are bonus, strict")
    assert "CONSTANT is not a function" in refusal(f"{rules}:CONSTANT")
    assert "the name after the colon does not exist" in refusal(f"{rules}:")


@pytest.mark.parametrize("source, said", [
    ("def f(:\n", "SyntaxError: "),
    ("import absent_dependency\n", "ModuleNotFoundError: No module named 'absent_dependency' (broken.py:1)"),
    ("x = 1\nraise RuntimeError('two\\nlines')\n", "RuntimeError: two lines (broken.py:2)"),
])  # fmt: skip
def test_a_file_that_does_not_import(tmp_path: Path, source: str, said: str) -> None:
    (tmp_path / "broken.py").write_text(source)
    before = set(sys.modules)
    assert said in refusal(f"{tmp_path}/broken.py:f")
    assert not {name for name in set(sys.modules) - before if "broken" in name}


def test_a_file_can_be_loaded_once_it_is_mended(tmp_path: Path) -> None:
    file = tmp_path / "mended.py"
    file.write_text("raise ValueError\n")
    assert "raised ValueError (mended.py:1)" in refusal(f"{file}:f")
    file.write_text("def f(completions):\n    return [4.0]\n")
    assert load(f"{file}:f")({"completions": ["a"]}) == [4.0]


@pytest.mark.process
def test_kwargs_that_the_function_does_not_take(rules: Path) -> None:
    assert "answers: strict has no such parameter: did you mean answer?" in refusal(
        f"{rules}:strict", kwargs={"answers": 1}
    )
    assert "completions from the rollout: leave it out" in refusal(f"{rules}:bonus", kwargs={"completions": []})
    # It had been tried, and failed: `zip() argument 2 is longer than argument 1`.
    assert refusal("exact_match", kwargs={"answer": "x"}).endswith(
        ".kwargs answer: exact_match receives answer from a column of the data: leave it out"
    )
    # Of a built-in everything else is a mistake, though this one takes columns by any name.
    assert "retrys: remote has no such parameter: did you mean retries?" in refusal(
        "remote", kwargs={"url": "https://127.0.0.1/", "retrys": 1}
    )
    (reward,) = load_rewards([RewardConfig(f"{rules}:bonus", kwargs={"anything": 1})])
    assert reward.kwargs == {"anything"}


def test_settings_of_a_builtin_are_checked_before_any_row() -> None:
    assert "missing 1 required keyword-only argument: 'pattern'" in refusal("format_regex")
    assert "ValueError: pattern '(' is not a regular expression" in refusal("format_regex", kwargs={"pattern": "("})
    assert "ngram 0 must be" in refusal("repetition_penalty", kwargs={"ngram": 0})
    assert "are not valid for repetition_penalty: TypeError" in refusal("repetition_penalty", kwargs={"ngram": "3"})


def test_a_column_may_be_called_as_a_setting_of_a_builtin() -> None:
    rewards = isolated(RewardConfig("format_tags", kwargs={"tags": ["think"]}))
    assert rewards.score(*rows("<think>so</think>", tags=[["algebra"]])).reward_B.tolist() == [1.0]


@pytest.mark.process
def test_a_function_object_is_called_in_a_worker_by_its_name_or_with_what_it_refers_to(capfd) -> None:
    """Those of a script or notebook ran in a thread, where math-verify's `signal.alarm` raises: with the usual
    try/except every reward was 0, and nothing was said."""
    rank, unread = os.getpid(), (line for line in "ab")

    def of_a_notebook(completions):
        return [rightness(completion) if os.getpid() != rank else 0.0 for completion in completions]

    def rightness(text):
        try:
            return float(verify(parse("$4$"), parse("$2+2$"))) if text else rightness("x")
        except ValueError:
            return 0.0

    class Doubles:
        def __call__(self, completions):
            return [2.0 * len(c) for c in completions]

    def holds_what_cannot_travel(completions):
        return [float(os.getpid() == rank) for _ in unread]

    configs = map(RewardConfig, (longer_is_better, of_a_notebook, Doubles, exact_match, holds_what_cannot_travel))
    rewards = isolated(*configs)
    assert rewards.names[-1] == "holds_what_cannot_travel"
    assert rewards.functions[0].interface.required == ["completion_ids"]
    scores = {name: value.tolist() for name, value in rewards.score(*rows("abc", "b", answer="aa")).by_function.items()}
    assert [*scores.values()][:4] == [[3.0, 1.0], [1.0, 1.0], [6.0, 2.0], [0.0, 0.0]]
    notices = [line for line in capfd.readouterr().err.splitlines() if "is called in a thread" in line]
    assert len(notices) == 1 and "holds_what_cannot_travel" in notices[0] and "signal.alarm" in notices[0]
    assert "cannot pickle 'generator' object" in notices[0]
    with pytest.raises(UserError, match="isolation process: what holds_what_cannot_travel refers to cannot be sent"):
        load_rewards([RewardConfig(holds_what_cannot_travel, isolation="process")])


def test_a_function_object_may_raise_be_awaited_or_be_slow() -> None:
    async def doubles(completions):
        return [2.0 * len(c) for c in completions]

    def raises(completions):
        raise RuntimeError(completions[0])

    def is_slow(completions):
        time.sleep(30)

    rewards = isolated(RewardConfig(doubles), RewardConfig(raises), RewardConfig(is_slow, timeout_s=0.2))
    scores = rewards.score(*rows("ab"))
    assert scores.by_function["doubles"].tolist() == [4.0]
    assert [statuses(scores, name) for name in ("raises", "is_slow")] == [["failed"], ["timed_out"]]


def test_a_batch_size_that_is_none(tmp_path: Path) -> None:
    (tmp_path / "sized.py").write_text("def f(completions): return []\nf.batch_size = 0\n")
    assert "has batch_size 0: set it to group, or to 1 or more" in refusal(f"{tmp_path}/sized.py:f")
    assert load(f"{tmp_path}/sized.py:f", batch_size=2).interface.batch_size == 2


@pytest.mark.parametrize("source, said", [
    ("import absent_dependency\n", "raised ModuleNotFoundError: No module named 'absent_dependency' (broken.py:1)"),
    ("import sys\nsys.exit('no\\nluck')\n", "rewards[0]: importing them raised SystemExit: no luck"),
    ("import os\nos._exit(0)\n", "rewards[0]: the process that imports them died: import them by hand"),
    ("import time\ntime.sleep(100)\n", "takes longer than scoring.max_import_s 1: look for what"),
    ("def f(): return []\ndef f(completion_id): return []\n", None),
    ("def g(completions): return []\n", "f does not exist in"),
])  # fmt: skip
@pytest.mark.process
def test_what_goes_wrong_in_the_importing_process_is_told_in_a_line(tmp_path, source, said) -> None:
    (tmp_path / "broken.py").write_text(source)
    config = RewardConfig(f"{tmp_path}/broken.py:f")
    if said is None:
        with pytest.raises(UserError, match="f needs completion_id, which is neither a column"):
            isolated(config).check_columns(["answer"])
        return
    start = time.perf_counter()
    with pytest.raises(UserError) as caught:
        load_rewards([config], ScoringConfig(max_import_s=1.0 if "sleep" in source else 60.0))
    assert said in str(caught.value) and "\n" not in str(caught.value)
    assert time.perf_counter() - start < 20
    assert in_time(lambda: not any(str(tmp_path) in line for line in command_lines()))


def test_describe_is_one_line_that_points_into_the_file() -> None:
    try:
        raise KeyError("two\n  lines")
    except KeyError as error:
        line = error.__traceback__.tb_lineno  # type: ignore[union-attr]
        assert describe(error, __file__) == rf"KeyError: 'two\n lines' (test_loader.py:{line})"
        assert describe(error, None) == r"KeyError: 'two\n lines'"


@pytest.mark.parametrize(
    "launcher, workers", [({}, 8), ({"LOCAL_SIZE": "4"}, 4), ({"LOCAL_WORLD_SIZE": "4"}, 4), ({"LOCAL_SIZE": "16"}, 2)]
)
def test_the_ranks_of_a_machine_share_its_cores(monkeypatch, launcher: dict[str, str], workers: int) -> None:
    for name in ("LOCAL_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in launcher.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: range(16), raising=False)
    assert worker_count() == workers
