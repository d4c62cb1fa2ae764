"""Runs on prompts with pictures: one rank and two, resumed, and what they leave."""

import json
import shutil

import forks
import pytest
from pyarrow import parquet
from seeing import make_task

SETTINGS = {
    **{"policy.dtype": "float32", "policy.lr": 1e-3, "engine.zero_stage": 3, "log.wandb": "disabled"},
    **{"data.path": "rows.jsonl", "data.shuffle": "false", "data.max_prompt_tokens": 80, "grpo.beta": 0.05},
    **{"rollout.prompts_per_step": 4, "rollout.num_generations": 4, "rollout.max_completion_tokens": 8},
    **{
        "rewards": "[{function: kinds.py:kinds}]",
        "grpo.num_minibatches": 2,
        "log.rollouts_every": 1,
        "checkpoint.every": 2,
        "run.steps": 4,
    },
}


ENVIRONMENT = """
import random

from PIL import Image


class Looks:
    shows_pictures = True

    def reset(self, images=None, **_):
        self.width = sum(image.open().width for image in images or ())
        self.turns = 0
        drawn = Image.new("RGB", (16, 16), (random.randrange(256), 0, 0))
        return [f" It is {self.width} wide.", drawn, "And this?"]

    def step(self, text):
        self.turns += 1
        turned = Image.new("RGB", (24, 8 + len(text)), (0, 0, random.randrange(256)))
        return ["And now?", turned], self.width + len(set(text)) / 20, self.turns == 3


def showed(completions, completion_images):
    # Rewards see what the model was shown between its turns.
    answers = [sum(message["role"] == "user" for message in chat) for chat in completions]
    assert answers == [len(images) for images in completion_images], (answers, completion_images)
    return [sum(image.open().height for image in images) / 100 for images in completion_images]
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two runs of four steps, on one rank and on two. In a step, one of four prompts has pictures: a rank sees none."""
    folder = tmp_path_factory.mktemp("pictures")
    make_task(folder)
    for ranks in (1, 2):
        train(folder, f"of{ranks}", ranks)
    return folder


def train(folder, name, ranks, **more):
    settings = SETTINGS | {"policy.model": folder / "model", "run.name": name, "run.dir": folder / "runs"} | more
    arguments = [f"--{key}={value}" for key, value in settings.items()]
    done = forks.run("-m", "hybrid_grpo", "train", *arguments, world=ranks, cwd=folder)
    assert done.status == 0, done.out[-3000:] + done.err[-3000:]


def steps(folder, name):
    return list(map(json.loads, (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()))


@pytest.mark.process
@pytest.mark.ranks
def test_one_rank_and_two_sample_and_learn_the_same_also_where_one_has_no_picture(folder):
    one, two = (steps(folder, name) for name in ("of1", "of2"))
    assert len(one) == len(two) == 4
    for a, b in zip(one, two, strict=True):
        assert a["reward/mean"] == pytest.approx(b["reward/mean"], rel=1e-5), "the same completions"
        assert a["parity/logp_abs_diff_mean"] < 1e-5, "the sampler is the trainer"
        for name in ("policy/loss", "policy/grad_norm", "policy/kl"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6)
    sampled = [parquet.read_table(folder / f"runs/of{n}/rollouts/step_000004.parquet").to_pylist() for n in (1, 2)]
    one, two = (sorted((row["prompt_ids"], row["token_ids"]) for row in rows) for rows in sampled)
    assert one == two


@pytest.mark.process
@pytest.mark.ranks
def test_a_resumed_run_is_the_run_to_the_bit(folder):
    shutil.copytree(folder / "runs/of2", folder / "runs/again")
    shutil.rmtree(folder / "runs/again/model")
    shutil.rmtree(folder / "runs/again/checkpoints/step_000004")
    train(folder, "again", 2, **{"run.resume": "auto"})
    times = ("time/", "throughput/", "memory/", "progress/")
    whole, again = (
        [{name: value for name, value in step.items() if not name.startswith(times)} for step in steps(folder, run)]
        for run in ("of2", "again")
    )
    assert whole == again
    weights = [folder / "runs" / run / "model/model.safetensors" for run in ("of2", "again")]
    assert weights[0].read_bytes() == weights[1].read_bytes()


@pytest.mark.process
def test_teachers_and_guests_see_what_the_policy_sees(folder):
    """A twin of the policy gives every token its probability, as a teacher and as a guest."""
    rows = list(map(json.loads, (folder / "rows.jsonl").read_text().splitlines()))
    (folder / "answers.jsonl").write_text("".join(json.dumps(row | {"completion": "abc"}) + "\n" for row in rows))
    guests = "[{name: file, path: answers.jsonl, weight: baseline}, {name: twin, model: model, weight: importance}]"
    told = {"guests.writers": guests, "run.steps": 1, "grpo.num_minibatches": 1, "grpo.beta": 0}
    told |= {"teacher.model": "model", "teacher.into": "loss", "rollout.num_generations": 6}
    train(folder, "beside", 1, **told)
    (step,) = steps(folder, "beside")
    assert step["guests/file/rows"] == step["guests/twin/rows"] == 4 and step["guests/file/missing"] == 0
    assert abs(step["teacher/kl"]) < 1e-5 and step["guests/twin/ratio_max"] == pytest.approx(1, abs=1e-5)


@pytest.mark.process
@pytest.mark.ranks
def test_environments_see_and_show_pictures_in_prompts_and_between_turns(folder):
    """One rank and two, of which one then trains on what the other has seen, with two optimizer steps."""
    (folder / "looks.py").write_text(ENVIRONMENT)
    told = {"rollout.environment": "looks.py:Looks", "rollout.max_turns": 3, "rollout.max_completion_tokens": 16}
    told |= {"rollout.max_tool_tokens": 60, "rollout.logit_bias": "{2: 4}", "data.max_prompt_tokens": 120}
    told |= {"rewards": "[{function: looks.py:showed}]"}
    told |= {"run.steps": 2, "checkpoint.every": 1, "grpo.num_minibatches": 1, "grpo.balance": "auto"}
    for ranks in (1, 2):
        train(folder, f"looks{ranks}", ranks, **told)
    one, two = (steps(folder, f"looks{ranks}") for ranks in (1, 2))
    for a, b in zip(one, two, strict=True):
        assert max(a["parity/logp_abs_diff_mean"], b["parity/logp_abs_diff_mean"]) < 1e-5
        for name in ("reward/mean", "policy/loss", "policy/grad_norm", "policy/kl"):
            assert a[name] == pytest.approx(b[name], rel=1e-3, abs=1e-6)
    lines = (folder / "runs/looks2/rollouts/step_000001.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    turns = [len(row["messages"]) // 2 for row in rows]
    assert max(turns) == 2, "turns are answered"
    before = [len(row["pictures"]) - answered for row, answered in zip(rows, turns, strict=True)]
    assert set(before) == {1, 3}, "the environment's own, and the row's before it"
    assert all(
        ("It is 32 wide." in str(row["prompt"])) == (shown == 3) for row, shown in zip(rows, before, strict=True)
    )
    assert len({row["pictures"][shown - 1]["file"] for row, shown in zip(rows, before, strict=True)}) == 4
    last = next(row for row in rows if len(row["messages"]) == 5)
    assert last["messages"][3]["content"] == [{"type": "text", "text": "And now?"}, {"type": "image"}]
    assert last["pictures"][-1]["name"] == "of the answer to turn 2"
    copies = {path.name for path in (folder / "runs/looks2/pictures").iterdir()}
    assert {picture["file"] for row in rows for picture in row["pictures"]} <= copies
    read = parquet.read_table(folder / "runs/looks2/rollouts/step_000001.parquet").to_pylist()
    said = [part["text"] for row in read for part in row["given"]]
    assert len(said) == sum(turns) and all(text.count("\ufffc") == 1 for text in said)


def test_completions_name_their_pictures_and_copies_lie_beside_them(folder):
    lines = (folder / "runs/of2/rollouts/step_000002.jsonl").read_text().splitlines()
    rows = list(map(json.loads, lines))
    seen = [row for row in rows if "pictures" in row]
    assert len(seen) == 4 and [of["name"] for of in seen[0]["pictures"]] == ["0.png", "1.png"]
    assert seen[0]["columns"]["images"] == ["0.png", "1.png"]
    files = {path.name for path in (folder / "runs/of2/pictures").iterdir()}
    assert {of["file"] for row in seen for of in row["pictures"]} <= files and len(files) == 4


def test_the_export_is_the_whole_checkpoint_with_its_processor(folder):
    start, model = ({path.name for path in (folder / of).iterdir()} for of in ("model", "runs/of2/model"))
    assert start <= model and "preprocessor_config.json" in model
