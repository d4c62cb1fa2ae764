"""What the functions of Python take, and what they refuse: in one line, in words of Python, before anything loads."""

import datasets
import numpy as np
import pandas
import pytest
import torch
from char_tokenizer import char_tokenizer
from peft import LoraConfig
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import hybrid_grpo as hg
from hybrid_grpo import engine
from hybrid_grpo.commands.arguments import settings_from
from hybrid_grpo.commands.configs import EvaluateConfig
from hybrid_grpo.config import TrainConfig
from hybrid_grpo.config.building import build
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.sources import evaluation_source, read_rows, training_source

SMALL = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=8)
ROWS = [{"prompt": "dcab=", "answer": "abcd"}]


def reward(completions, **columns):
    return [0.0 for _ in completions]


GOOD = {"model": "nowhere", "data": ROWS, "rewards": reward}
BAD = [
    ({"policy": 5}, r"policy is 5: give its settings as a dictionary, as in policy=\{...\}"),
    ({"policy": "lr"}, "policy is 'lr': give its settings"), ({"policy": None}, "policy is None: .* or leave it out"),
    ({"grpo": reward}, "grpo is the function reward: give its settings"),
    ({"engine": TrainConfig}, "engine is the class TrainConfig: give its settings"),
    ({"policy": {"lr": "fast"}}, "policy.lr: expected"),
    ({"policy": {"learning_rate": 1e-6}}, "there is no setting policy.learning_rate: .*policy.lr"),
    ({"learning_rate": 1e-6}, "there is no setting learning_rate"),
    ({"polcy": {"lr": 1e-6}}, "there is no setting polcy.lr: did you mean policy.lr"),
    ({"run": {"steps": 0}}, "run.steps 0 must be 1 or greater"),
    ({"rewards": 5}, "rewards is 5: give a function, a name such as exact_match"),
    ({"rewards": [reward, None]}, r"rewards\[1\] is None: give a function"),
    ({"rewards": []}, r'rewards is empty: give at least one, as in rewards=\["exact_match"\]'),
    ({"rewards": [3.0, reward]}, r"rewards\[0\] is 3.0: give a function"),
    ({"rewards": {"weight": 1.0}}, r"rewards\[0\].function"),
    ({"model": 5}, "model is 5: give a folder, a hub name, or a model of transformers"),
    ({"model": torch.nn.Linear(2, 2)}, "model is a Linear: give a folder"),
    ({"model": LlamaForCausalLM}, "model is the class LlamaForCausalLM: give a folder"),
    ({"model": b"path"}, "model is a bytes: give a folder"),
    ({"model": LlamaForCausalLM(SMALL)}, "model is an object, and its tokenizer is not where it was loaded from"),
    ({"data": 5}, "data is 5: give a file, folder"), ({"data": b"rows"}, "data is a bytes: give a file"),
    ({"data": reward}, "data is the function reward: give a file"),
    ({"data": np.ones(3)}, "data is a ndarray: give a file"),
    ({"data": {"prompt": ["a"], "answer": ["b", "c"]}}, "data cannot be read as columns of rows"),
    ({"data": {"promt": ["a"]}}, "there is no setting data.promt"), ({"data": {"path": 5}}, "data.path: expected"),
    ({"data": {"path": {"prompt": ["a"], "answer": []}}}, "data.path cannot be read as columns of rows"),
    ({"eval": {"sets": {"x": {"rewards": 5}}}}, "eval.sets.x.rewards: expected a list"),
    ({"config": {5: 1}}, "there is no setting 5"), ({"config": 5}, "config is 5: give a YAML file, a dictionary"),
    ({"config": "nothere.yaml"}, "config nothere.yaml: there is no such file"),
    ({"config": [{"policy": {"lr": 1e-6}}, 3]}, "config is 3: give a YAML file"),
    ({"config": {"policy": {"lrr": 1}}}, "there is no setting policy.lrr"),
    ({"lora": LoraConfig(r=4, use_dora=True)}, "lora: adapters here have no use_dora: leave it out"),
    ({"features": 3}, "features"),
]  # fmt: skip


@pytest.mark.parametrize(("wrong", "message"), BAD, ids=[str(number) for number in range(len(BAD))])
def test_a_wrong_argument_is_one_line(wrong, message, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(engine, "start", lambda *_: pytest.fail("the run has begun"))
    with pytest.raises(UserError, match=message) as refused:
        hg.train(**{**GOOD, **wrong})
    text = str(refused.value)
    assert "\n" not in text and len(text) < 300 and "--" not in text
    assert refused.value._render_traceback_() == [f"UserError: {text}"], "what a notebook shows"
    assert not list(tmp_path.iterdir())


def settings(cls=TrainConfig, command="train", **arguments):
    given = {name: arguments.pop(name, None) for name in ("model", "data", "rewards", "config")}
    return settings_from(cls, command, sections=arguments, **given)


def test_rows_come_in_many_forms():
    columns = {"prompt": ["a", "b"], "answer": ["c", "d"]}
    rows = [{"prompt": "a", "answer": "c"}, {"prompt": "b", "answer": "d"}]
    dataset = datasets.Dataset.from_list(rows)
    for data in (rows, tuple(rows), columns, pandas.DataFrame(columns), dataset):
        assert list(settings(data=data)["data"]["path"]) == rows
        assert list(settings(EvaluateConfig, "evaluate", data=data)["data"]["eval_path"]) == rows
    splits = datasets.DatasetDict({"train": dataset, "test": dataset.select([1])})
    assert list(settings(data=splits)["data"]["path"]) == rows
    assert list(settings(EvaluateConfig, "evaluate", data=splits)["data"]["eval_path"]) == rows[1:]
    assert settings(data={"path": "x.jsonl", "limit": 5})["data"] == {"path": "x.jsonl", "limit": 5}


def test_rows_come_in_as_many_forms_within_a_section():
    """They were converted only as the argument `data`: with `data={"path": table}` a run ended in a traceback."""
    columns = {"prompt": ["a", "b"], "answer": ["c", "d"]}
    rows = [{"prompt": "a", "answer": "c"}, {"prompt": "b", "answer": "d"}]
    splits = datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)})
    for data in (rows, tuple(rows), columns, pandas.DataFrame(columns)):
        sets = {"x": {"path": data, "rewards": reward}, "y": {"path": data, "rewards": {"function": reward}}}
        sections = {"data": {"path": rows, "eval_path": data}, "eval": {"sets": sets}}
        for given in (settings(**sections), settings(config=sections)):
            config = build(TrainConfig, given)
            found = [config.data.eval_path, *(held_out.path for held_out in config.eval.sets.values())]
            assert [list(path) for path in found] == [rows] * 3
            assert [[r.function for r in held_out.rewards] for held_out in config.eval.sets.values()] == [[reward]] * 2
        mixed = build(TrainConfig, settings(data={"mixture": [{"path": data, "name": "q"}]}))
        assert list(mixed.data.mixture[0].path) == rows
    config = build(TrainConfig, settings(data={"path": splits, "eval_split": "train"}))
    assert read_rows(training_source(config.data)) == read_rows(evaluation_source(config.data)) == rows


def test_recipes_are_files_and_dictionaries_and_arguments_win(tmp_path):
    (tmp_path / "a.yaml").write_text("policy: {lr: 1e-5, dtype: float32}\n")
    one = {"policy": {"lr": 2e-5, "weight_decay": np.float32(0.5)}, "run": {"seed": np.int64(3), "dir": tmp_path}}
    given = settings(config=[tmp_path / "a.yaml", one], policy={"lr": 3e-5})
    assert build(TrainConfig, given).run.dir == str(tmp_path) and type(given["run"]["seed"]) is int
    assert given["policy"] == {"lr": 3e-5, "dtype": "float32", "weight_decay": 0.5}
    assert settings(lora=LoraConfig(r=4, lora_alpha=8, target_modules=["v_proj", "q_proj"]))["lora"] == {
        **{"rank": 4, "alpha": 8, "target_modules": ["q_proj", "v_proj"]}
    }


def test_names_are_listed_for_completion():
    assert set(hg.__all__) <= set(dir(hg))


def test_a_model_object_is_saved_with_its_tokenizer_once_the_settings_are_right(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    LlamaForCausalLM(SMALL).save_pretrained("model")
    char_tokenizer().save_pretrained("model")
    model = AutoModelForCausalLM.from_pretrained("model")
    monkeypatch.setattr(engine, "start", lambda *_: pytest.fail("the run has begun"))
    with pytest.raises(UserError, match=r"policy\.lr"):
        hg.train(**{**GOOD, "model": model, "run": {"name": "mine"}, "policy": {"lr": -1.0}})
    assert not (tmp_path / "runs").exists(), "nothing is left of a mistake"
    with pytest.raises(pytest.fail.Exception, match="has begun"):
        hg.train(**{**GOOD, "model": model, "run": {"name": "mine"}})
    saved = {path.name for path in (tmp_path / "runs/mine-start").iterdir()}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= saved
    # Without a run, whatever its section says, the folder is temporary.
    folder = settings(EvaluateConfig, "evaluate", model=model, run={"seed": 1})["policy"]["model"]
    assert not folder.startswith("runs")
    # Without a name, the model was saved by another name than the run's each time, and no run could be resumed.
    first = settings(model=model, run={"resume": "auto"})
    (tmp_path / "runs" / (name := first["run"]["name"])).mkdir()
    monkeypatch.setattr("hybrid_grpo.run.folder.unused_name", lambda *_: "later")
    assert first["policy"]["model"] == f"runs/{name}-start" and settings(model=model, run={"resume": "auto"}) == first
