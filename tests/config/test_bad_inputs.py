"""Whatever a user gives: one line that names it and the way out, status 2, and nothing left behind.

A case is a command line, with variables of the environment in front of it, and words of the line. Options alone are
given to `train --config train.yaml`.
"""

from __future__ import annotations

import errno
import io
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import fields, replace
from pathlib import Path
from unittest import mock

import bad_inputs
import forks
import pytest
import yaml
from bad_inputs import Ended
from workshop import Workshop

from hybrid_grpo import __main__ as program
from hybrid_grpo.config import TrainConfig

RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
SETTINGS = [
    # Commands and options
    ("trian", "there is no command trian", "train, sft, reward, eval, plan, report"),
    ("report", "usage: hybrid-grpo report RUN_FOLDER [--text]"),
    ("report nomodel", "nomodel is not the folder of a run"),
    *[(f"report {name}", f"{name} has no metrics.jsonl with a step") for name in ("emptyrun", "binaryrun", "listrun")],
    ("train --local_rank=0", "--local_rank=0, which is not a setting: start it with --no_local_rank"),
    ("train policy.lr 1", "policy.lr is not an option: give settings as --section.name value"),
    ("--run.steps", "run.steps: expected one argument"),
    ("--polcy.lr=1", "there is no setting polcy.lr: did you mean policy.lr?"),
    ("--policy.learning_rate=1", "there is no setting policy.learning_rate"),
    ("--run.name=\udcff", "an argument is not UTF-8: --run.name=\\udcff"),
    ("--run.name \udcff", "run.name is not UTF-8: \\udcff"),
    # Numbers, in every section that has some
    ("--policy.lr=nan", "policy.lr: expected a finite number, got nan"),
    ("--policy.lr=inf", "policy.lr: expected a finite number, got inf"),
    ("--policy.lr=1e400", "policy.lr: expected a finite number, got inf"),
    ("--policy.lr=-1", "policy.lr -1 must be greater than 0"),
    ("--policy.lr=fast", "policy.lr: expected a finite number, got fast"),
    ("--policy.betas=[1,0.9]", "policy.betas 1 must be in [0, 1)"),
    ("--policy.betas=[0.9]", "policy.betas: expected [number, number], got [0.9]"),
    ("--policy.warmup_steps=1.5", "policy.warmup_steps: expected a whole number, got 1.5"),
    ("--policy.max_grad_norm=0", "policy.max_grad_norm 0 must be greater than 0"),
    ("--policy.weight_decay=-1", "policy.weight_decay -1 must be 0 or greater"),
    ("--policy.dtype=float16", "policy.dtype: expected bfloat16 or float32, got float16"),
    ("--rollout.temperature=inf", "rollout.temperature: expected a finite number, got inf"),
    ("--rollout.top_p=1.5", "rollout.top_p 1.5 must be in (0, 1]"),
    ("--rollout.top_k=-1", "rollout.top_k -1 must be 0 or greater"),
    ("--rollout.stop_ids=[-1]", "rollout.stop_ids -1 must be 0 or greater"),
    ("--rollout.cache_gb=1e300", "rollout.cache_gb 1e+300 must be 1000000 or less"),
    ("--rollout.num_generations=1", "rollout.num_generations 1", "2 or more"),
    ("--rollout.num_generations=1000000", "rollout.num_generations 1000000 x 4 prompts", "lower one"),
    ("--rollout.max_turns=0", "rollout.max_turns 0 must be 1 or greater"),
    ("--rollout.max_turn_tokens=0", "rollout.max_turn_tokens 0 must be 1 or greater"),
    ("--rollout.min_completion_tokens=4 --rollout.max_turn_tokens=3", "rollout.max_turn_tokens 3: set it to that"),
    ("--rollout.tools='[\"calculator\"]' --rollout.ignore_eos=true", "rollout.tools", "rollout.ignore_eos", "take out"),
    ("--rollout.environment=a.py:G --rollout.ignore_eos=true", "rollout.environment", "rollout.ignore_eos", "take out"),
    ("--rollout.environment=a.py:exact_match", "rewards: exact_match is also the name of an environment", "`name`"),
    ("--rollout.tools='[{kwargs: {folder: x}}]'", "rollout.tools[0].function is not set: give one"),
    *[(f"--rollout.{settings}", *says) for settings, *says in [
        ("user=f.py:g --rollout.user_model=model --rollout.user_prompt=x", "both play the user: take out one of them"),
        ("user_model=model", "rollout.user_model needs to know whom it plays: set rollout.user_prompt"),
        ("user_prompt=x", "has no effect without rollout.user_model"),
        ("user_stop=[x]", "has no effect without rollout.user or rollout.user_model"),
        ("user=f.py:g --rollout.ignore_eos=true", "rollout.user speaks between turns", "take out one"),
    ]],
    ("--rollout.max_completion_tokens=9999999999999999999", "must be 9007199254740992 or less"),
    ("--rollout.logit_bias='{\"-1\": 1}'", "rollout.logit_bias '-1' is not a token id"),
    ("--grpo.beta=nan", "grpo.beta: expected a finite number, got nan"),
    ("--grpo.num_minibatches=3", "rollout.prompts_per_step 4", "grpo.num_minibatches", "nearest value is 3"),
    ("--run.steps=0", "run.steps 0 must be 1 or greater"),
    ("--run.seed=-1", "run.seed -1 must be 0 or greater"),
    ("--run.seed=99999999999999999999", "run.seed 99999999999999999999 must be 9007199254740992 or less"),
    ("--eval.threshold=nan", "eval.threshold: expected a finite number, got nan"),
    ("--log.trackers=[wandb,tensorbord]", "log.trackers tensorbord is not a tracker: did you mean tensorboard?"),
    ("--log.trackers=[wandb,wandb]", "log.trackers names wandb twice: take one out"),
    ("--log.wandb_view=true --log.wandb=offline", "log.wandb_view needs wandb online, and log.trackers is ['wandb']"),
    ("--log.histograms_every=-1", "log.histograms_every -1 must be 0 or greater"),
    ("--grpo.kl_coef=1", "there is no setting grpo.kl_coef: verl's kl_coef is grpo.beta"),
    ("--rollout.n=1", "there is no setting rollout.n: verl's rollout.n is rollout.num_generations"),
    ("--policy.use_vllm=true", "there is no setting policy.use_vllm: TRL's use_vllm has nothing to set here"),
    ("--alarms.kul=null", "there is no setting alarms.kul: did you mean alarms.kl?"),
    ("--alarms.kl.abuv=1", "there is no setting alarms.kl.abuv: did you mean above?"),
    ("--alarms.kl.above=x", "alarms.kl.above: expected a finite number or null, got x"),
    ("--alarms.kl.patience=0", "alarms.kl.patience 0 must be 1 or greater"),
    ("--alarms.kl.action=explode", "alarms.kl.action: expected say or skip or stop or roll_back, got explode"),
    ("--alarms.kl.action=skip", "alarms.kl: action skip is for length_runaway", "set it to say, stop or roll_back"),
    ("--alarms.kl.above=null", "alarms.kl has neither above nor below: give one of them, or null to turn it off"),
    ("--alarms.kl=3", "alarms.kl 3 must be settings, as in {above: ...}"),
    ("--log.profile=0", "log.profile 0 must be 1 or greater"),
    ("--log.profile=[3,3]", "log.profile [3, 3] names a step twice: take one out"),
    ("--log.profile=soon", "log.profile: expected a whole number or a list, got soon"),
    ("--run.steps=9 --log.profile=[3,10]", "log.profile 10 is after the last step, run.steps 9: name an earlier one"),
    ("--checkpoint.keep=0", "checkpoint.keep 0 must be 1 or greater"),
    ("--lora.rank=-1", "lora.rank -1 must be 0 or greater"),
    ("--data.limit=0", "data.limit 0 must be 1 or greater"),
    ("--scoring.memory_gb=1e300", "scoring.memory_gb 1e+300 must be 1000000 or less"),
    ("--scoring.max_wait_s=inf", "scoring.max_wait_s: expected a finite number, got inf"),
    ("sft --sft.batch_size=0", "sft.batch_size 0 must be 1 or greater"),
    ("plan --config train.yaml --plan.world_size=0", "plan.world_size 0 must be 1 or greater"),
    ("serve-reward --rewards exact_match --serve.port=99999", "serve.port 99999 must be in [0, 65535]"),
    ("watch listrun --watch.port=99999", "watch.port 99999 must be in [0, 65535]"),
    ("watch --watch.port=0", "usage: hybrid-grpo watch RUNS..."),
    ("watch listrun no/such", "no/such is not a folder: give the folder of a run"),
    ("replay-step oldrun", "usage: hybrid-grpo replay-step RUN STEP"),
    ("replay-step oldrun 0", "STEP is the number of a step, from 1"),
    ("replay-step nomodel 1", "nomodel is not the folder of a run: it has no config.yaml"),
    ("replay-step sftrun 1", "sftrun is a run of sft: replay-step is for runs of train"),
    ("replay-step oldrun 3", "oldrun has no step 3: it has steps 1 to 2"),
    ("replay-step oldrun 2", "step 2 was skipped by an alarm: nothing was learned"),
    ("replay-step oldrun 1 --replay.rewards=new", "replay.rewards: expected again or saved, got new"),
    ("replay-step oldrun 1 --replay.out=oldrun/rollouts", "replay.out oldrun/rollouts has the files of the run"),
    ("replay-step oldrun 1 --replay.out=train.jsonl", "replay.out train.jsonl is a file: give a folder"),
    ("watch train.jsonl", "train.jsonl is not a folder"),
    # Rewards
    ("--rewards=[", "rewards [ cannot be read as YAML"),
    ("--rewards=3", "rewards: expected a list such as [{function: ...}], got 3"),
    ("--rewards=[3]", "rewards[0] 3 must be settings"),
    ("--rewards=[{}]", "rewards[0].function is not set"),
    ("--rewards=exact_match,exact_match", "two are named exact_match: set `name`"),
    ("--rewards='[{function: exact_match, weight: nan}]'", "rewards[0].weight: expected a finite number"),
    ("--rewards='[{function: exact_match, timeout_s: 1e300}]'", "rewards[0].timeout_s 1e+300 must be 1"),
    ("--rewards='[{function: exact_match, kwargs: 3}]'", "rewards[0].kwargs: expected a mapping, got 3"),
    ("--rewards='[{function: exact_match, name: a/b}]'", "rewards[0].name 'a/b' must be at most 128 letters"),
    # DeepSpeed
    ("--engine.zero_stage=4", "engine.zero_stage 4 must be in [0, 3]"),
    ("--engine.deepspeed=abc", "engine.deepspeed: expected a mapping, got abc"),
    ("--engine.deepspeed.zero_optimisation.stage=3", "zero_optimisation is not a setting", "mean zero_optimization?"),
    ("--engine.deepspeed.zero_optimization=3", "engine.deepspeed.zero_optimization 3 must be a section"),
    ("--engine.deepspeed.bf16.enabled=true", "engine.deepspeed.bf16.enabled is set by policy.dtype"),
    # Recipes
    ("train --config no.yaml", "--config no.yaml: there is no such file"),
    ("train --config nomodel", "--config nomodel is a folder"),
    ("train --config typo.yaml", "there is no setting polcy.lr: did you mean policy.lr?"),
    ("train --config recursive.yaml", "--config recursive.yaml cannot be read", "contains itself"),
    ("train --config bomb.yaml", "--config bomb.yaml cannot be read", "more than 100000 values"),
    ("train --config deep.yaml", "--config deep.yaml cannot be read", "nested too deeply"),
    ("train --config binary.yaml", "--config binary.yaml cannot be read: 'utf-8' codec"),
    ("train --config tag.yaml", "--config tag.yaml cannot be read", "python/object"),
    ("train --config list.yaml", "--config list.yaml holds no settings"),
    ("train --config empty.yaml", "--config empty.yaml holds no settings"),
    ("train --config nul.yaml", "--config nul.yaml cannot be read"),
    ("train --config two.yaml", "--config two.yaml cannot be read", "another document"),
    ("train --config half.yaml", "--config half.yaml cannot be read"),
    ("train --config twice.yaml", "--config twice.yaml cannot be read", "steps is given twice"),
    ("train --config section.yaml", "--config section.yaml: policy must have settings below it"),
    ("train --config date.yaml", "--config date.yaml cannot be read"),
    # Places
    ("--run.name=../x", "run.name '../x' must be at most 128 letters"),
    ("--run.dir=", "run.dir is empty"),
    ("--run.dir=~/runs", "run.dir ~/runs: only shells expand ~"),
    ("--run.dir=train.jsonl/x", "run.dir train.jsonl/x: train.jsonl is a file, not a folder"),
    ("--run.dir=/proc/nothing", "run.dir /proc/nothing: no folder can be made there"),
    (f"--run.dir={'x' * 300}", "no folder can be made there: File name too long"),
    ("--policy.model=nomodel", "policy.model nomodel is not a model folder: it has no config.json"),
    ("--policy.model=train.jsonl", "policy.model train.jsonl is a file"),
    ("--policy.model=./none", "policy.model ./none: there is no such folder"),
    ("--data.path=no.jsonl", "data.path no.jsonl: there is no such file or folder"),
    ("--data.path=empty.jsonl", "data.path empty.jsonl is empty"),
    ("--data.path=pipe.jsonl", "data.path pipe.jsonl is neither a file nor a folder"),
    ("--data.path=/dev/null", "data.path /dev/null is neither a file nor a folder"),
    ("--data.path=loop.jsonl", "data.path loop.jsonl: there is no such file or folder"),
    ("--data.eval_path=empty.jsonl", "data.eval_path empty.jsonl is empty"),
    ("score train.jsonl --rewards exact_match --score.output=nomodel", "score.output nomodel is a folder"),
    ("score no.jsonl --rewards exact_match", "SOURCE no.jsonl: there is no such file or folder"),
    # Ranks
    ("WORLD_SIZE=abc RANK=0 --run.name=x", "WORLD_SIZE 'abc' in the environment must be a whole number"),
    ("WORLD_SIZE=0 RANK=0 --run.name=x", "WORLD_SIZE '0' in the environment must be a whole number of 1"),
    ("WORLD_SIZE=2 RANK=2 --run.name=x", "RANK '2' in the environment must be a whole number of 0 to 1"),
    ("WORLD_SIZE=2 RANK=-1 --run.name=x", "RANK '-1' in the environment must be a whole number of 0 to 1"),
    ("WORLD_SIZE=2 RANK=0 LOCAL_RANK=x --run.name=x", "LOCAL_RANK 'x' in the environment must be"),
    ("WORLD_SIZE=1 RANK=0 MASTER_PORT=99999 --run.name=x", "MASTER_PORT '99999' in the environment", "1 to 65535"),
    ("LOCAL_SIZE=x --run.name=x", "LOCAL_SIZE 'x' in the environment must be a whole number"),
    ("WORLD_SIZE=2 RANK=0 --run.name=x", "without LOCAL_RANK, MASTER_ADDR, MASTER_PORT"),
    ("DS_ACCELERATOR=CPU --run.name=x", "DS_ACCELERATOR 'CPU' in the environment must be cpu or cuda: set it to one"),
    ("DS_ACCELERATOR=foo --run.name=x", "DS_ACCELERATOR 'foo' in the environment must be cpu or cuda: set it to one"),
]  # fmt: skip

LOADED = [
    # Rows
    ("--data.path=blank.jsonl", "data.path blank.jsonl", "no rows"),
    ("--data.path=noprompt.jsonl", "data.prompt_column prompt", "question"),
    ("sft --config sft.yaml --data.path=train.jsonl", "data.completion_column completion", "has no such column"),
    (
        "sft --config sft.yaml --data.path=train.jsonl --data.completion_column=answer --sft.batch_size=1000",
        "sft.batch_size 1000 is more than the", "rows: lower it, or give more rows",
    ),
    ("--data.path=binary.jsonl", "data.path binary.jsonl line 1 is not JSON ('utf-8' codec"),
    ("--data.path=binary.parquet", "data.path binary.parquet cannot be read"),
    ("--data.path=data.txt", "data.path data.txt is neither JSONL nor parquet"),
    ("--data.path=deep.jsonl", "data.path deep.jsonl line 1 is not JSON", "recursion"),
    ("--data.path=list.jsonl", "data.path list.jsonl line 1 is a list"),
    ("--data.path=half.jsonl", "data.path half.jsonl line 1 is not JSON", "surrogates"),
    ("--data.path=number.jsonl", "data.prompt_column prompt: row 0", "give text or a list"),
    ("--data.path=digits.jsonl", "data.path digits.jsonl line 1 is not JSON"),
    ("--data.path=huge.jsonl", "data.max_prompt_tokens 512: all 1 prompts of huge.jsonl"),
    ("--data.split=nope", "data.split nope: there is no such split", "has train"),
    ("--data.subset=x", "data.subset x: data.path train.jsonl has no subsets"),
    ("--data.max_prompt_tokens=2", "data.max_prompt_tokens 2: all 12 prompts"),
    ("--rollout.prompts_per_step=16", "rollout.prompts_per_step 16", "12 prompts", "12 or lower"),
    ("--rollout.max_completion_tokens=64", "70 tokens", "64 positions", "max_completion_tokens to 64"),
    ("--rollout.max_total_tokens=1", "max_total_tokens 1 leaves no tokens to sample after a prompt", "raise it"),
    ("--rollout.stop_ids=[999]", "rollout.stop_ids 999", "end at 28"),
    ("--rollout.tools='[\"calculator\"]'", "rollout.tools are called in chats", "a chat template that knows tools"),
    ("--rollout.environment=a.py:Game", "rollout.environment is asked in chats", "a chat template"),
    ("--rollout.user=f.py:g", "rollout.user speaks in chats", "a chat template"),
    ("score binary.jsonl --rewards exact_match", "SOURCE binary.jsonl line 1 is not JSON"),
    ("score half.jsonl --rewards exact_match", "SOURCE half.jsonl line 1 is not JSON"),
    ("score nocompletion.jsonl --rewards exact_match", "data.completion_column completion: row 0"),
    ("score binaryrun", "binaryrun", "step_000001.jsonl line 1 is not JSON"),
    ("score copyrun", "copyrun"),
    ("replay-step oldrun 1 --rollout.temperature=0.5", "temperature 1.0 -> 0.5 cannot be replayed"),
    ("replay-step oldrun 1 --replay.rewards=saved --rewards=repetition_penalty", "rewards names others: take out one"),
    ("replay-step oldrun 1 --replay.completions=saved", "the run has not saved the tokens of step 1"),
    ("eval --config train.yaml --data.eval_path=null", "data.eval_path and data.eval_split are not set"),
    # Rewards
    ("--rewards no.module:f", "rewards[0].function no.module:f", "no module no"),
    ("--rewards my_rewards.py:rais", "rewards[0].function", "did you mean raises?"),
    ("--rewards broken_rewards.py:reward", "broken_rewards.py:1", "a_module_that_is_not_there"),
    ("--rewards loops.py:f --scoring.max_import_s=1", "takes longer than scoring.max_import_s 1", "raise it"),
    ("--rewards exits.py:f", "importing them raised SystemExit: 3"),
    ("--rewards dies.py:f", "the process that imports them died"),
    ("--rewards raises.py:f", "importing raises.py raised OSError: x y (raises.py:1)"),
    ("--rewards syntax.py:f", "importing syntax.py raised SyntaxError"),
    ("--rewards binary.py:f", "importing binary.py raised"),
    ("--rewards functions.py:f", "f is not a function in functions.py: known are needs"),
    ("--rewards functions.py:needs", "needs needs nothere, which is neither a column of the data nor in its kwargs"),
    # It was called a column of the data, which has it.
    ("--data.eval_path=nocompletion.jsonl", "exact_match needs answer", "data.eval_path nocompletion.jsonl nor in its"),
    # DeepSpeed
    ("--engine.deepspeed.zero_optimization.typo=1", "DeepSpeedZeroConfig typo Extra inputs"),
    ("--engine.deepspeed.zero_optimization.reduce_bucket_size=-1", "reduce_bucket_size Input should be greater"),
    ("--engine.deepspeed.optimizer.type=Muon", "engine.deepspeed.optimizer.type Muon is not supported (policy.lr"),
    ("--engine.deepspeed.wandb.enabled=true", "engine.deepspeed.wandb.enabled is not supported (log.trackers names"),
    ("--engine.deepspeed.flops_profiler=3", "engine.deepspeed: DeepSpeed refuses the configuration"),
    # Configurations of models
    *[(f"--policy.model={name}", f"policy.model {name}", *says) for name, *says in [
        ("fewer_layers", "num_hidden_layers 2, so that layers would be cut off"),
        ("more_layers", "its files end with layer 2", "num_hidden_layers 5"),
        ("hidden_size_64", "model.embed_tokens.weight has the shape [29, 128]", "asks for [29, 64]"),
        ("intermediate_size_100", "has the shape [128, 256]", "asks for [128, 100]"),
        ("vocab_size_20", "has the shape [29, 128]", "asks for [20, 128]"),
        ("num_key_value_heads_4", "has the shape [64]", "asks for [128]"),
        ("layer_types_list", "`num_hidden_layers` (3) must be equal to the number of `layer_types` (2)"),
        ("layer_types_full", "'layer_types'"),
        ("num_hidden_layers_-1", "`num_hidden_layers` (-1)"),
        ("hidden_size_wide", "expected int, got str"),
        ("hidden_act_nope", "config.json describes no model: KeyError: 'nope'"),
        ("rope_parameters_dict", "config.json describes no model: KeyError: 'nope'"),
        ("model_type_nope", "model type `nope`"),
        ("eos_token_id_999", "end-of-sequence token 999", "vocab_size 29"),
        ("eos_generation", "end-of-sequence token 999", "vocab_size 29"),
        ("eos_text", "end-of-sequence token 'stop'"),
        ("bad_generation", "generation_config.json", "not a valid JSON"),
        ("code", "comes with code of its own", "which is not run"),
        ("brackets", "does not load", "recursion"),
        ("a_list", "does not load"),
        ("garbage", "not a valid JSON"),
        ("nothing", "not a valid JSON"),
        # Weights
        ("noweights", "has no weights", "model.safetensors"),
        ("pickled", "pickled weights (pytorch_model.bin)", "set policy.pickled_weights to true"),
        ("cut", "is cut short"),
        ("empty_file", "model.safetensors is not a safetensors file"),
        ("noise", "model.safetensors is not a safetensors file"),
        ("long_header", "model.safetensors is not a safetensors file"),
        ("list_header", "model.safetensors is not a safetensors file"),
        ("no_part", "names gone.safetensors, which is missing"),
        ("bad_index", "model.safetensors.index.json cannot be read"),
        # Tokenizers
        ("notokenizer", "has no tokenizer"),
        ("t_list", "its tokenizer does not load"),
        ("t_garbage", "its tokenizer does not load"),
        ("t_ids", "gives the token id 500, and vocab_size is 29: take"),
    ]],
    *[(f"--policy.model={name} --data.path=chat.jsonl", "data.chat_template: ", says) for name, says in [
        ("t_syntax", "refuses row 0 (from 0) of chat.jsonl [train]: unexpected"),
        ("t_raises", "refuses row 0 (from 0) of chat.jsonl [train]: no"),
        ("t_divides", "ZeroDivisionError"),
        ("t_range", "Range too big"),
        ("t_missing", "has no element 5"),
        ("model", "has no chat template"),
    ]],
]  # fmt: skip

FOUND_BY_LOADING = [
    ("--policy.model=nan", "policy.model nan: 1 of its weights hold NaN or infinity, model.norm.weight"),
    ("--policy.model=infinite", "policy.model infinite: 1 of its weights hold NaN or infinity"),
    ("--policy.model=lacking", "policy.model lacking lacks 1", "q_proj"),
]


def of_features(kind: str) -> Iterator[tuple[str, ...]]:
    """The lines of features' own files, but for those about two features of which one was taken out."""
    sections = {section.name for section in fields(TrainConfig)}
    for file in sorted(Path(__file__).parents[1].glob("features/*/bad_inputs.yaml")):
        for line, *says in yaml.safe_load(file.read_text()).get(kind, ()):
            if sections.issuperset(re.findall(r"--(\w+)\.", line)):
                yield line, *says


SETTINGS += of_features("settings")
LOADED += of_features("loaded")
"""The head of a run is written before its weights are read."""


def split(line: str) -> tuple[list[str], dict[str, str]]:
    """The arguments of a case, and its variables."""
    words = shlex.split(line)
    count = sum(word.partition("=")[0].isupper() for word in words if "=" in word)
    variables, words = dict(word.split("=", 1) for word in words[:count]), words[count:]
    return ["train", "--config", "train.yaml", *words] if words[0].startswith("--") else words, variables


def check(ended: Ended, says: tuple[str, ...]) -> None:
    assert ended.status == 2, ended.out[-1000:] + ended.err[-3000:]
    assert ended.err.startswith("hybrid-grpo") and ": error: " in ended.err, ended.err[-3000:]
    assert ended.err.count("\n") == 1 and "Traceback" not in ended.out
    assert all(words in ended.err for words in says), ended.err
    assert ended.seconds < 60
    assert not ended.left


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("bad_inputs"))
    # Called by the rank itself: a fork server for each of a hundred cases would take a minute.
    recipe = yaml.safe_load((workshop.folder / "train.yaml").read_text())
    workshop.write("train.yaml", yaml.safe_dump({**recipe, "rewards": ["exact_match"]}))
    yield workshop
    workshop.close()


@pytest.fixture(scope="module")
def loaded(workshop: Workshop) -> dict[str, Ended]:
    """What came of every case for which something is loaded, all in one process."""
    lines = [line for line, *_ in LOADED + FOUND_BY_LOADING]
    workshop.write("cases.json", json.dumps([split(line) for line in lines]))
    script = [Path(bad_inputs.__file__), "cases.json", "results.json"]
    done = forks.run(*script, cwd=workshop.folder, timeout=600)
    assert done.status == 0, done.err[-3000:]
    results = json.loads((workshop.folder / "results.json").read_text())
    return {line: Ended(**result) for line, result in zip(lines, results, strict=True)}


@pytest.fixture(scope="module")
def settings(tmp_path_factory):
    """A folder with what a command looks at before it loads anything."""
    folder = tmp_path_factory.mktemp("settings")
    for name, content in {
        "model/config.json": "{}",
        "train.jsonl": "{}\n",
        "sft.yaml": "{policy: {model: model}}",
    }.items():
        bad_inputs.write(folder / name, content)
    recipe = {
        **{"policy": {"model": "model"}, "data": {"path": "train.jsonl"}, "rewards": ["exact_match"]},
        "rollout": {"prompts_per_step": 4, "num_generations": 4, "max_completion_tokens": 8},
    }
    bad_inputs.write(folder / "train.yaml", json.dumps(recipe))
    bad_inputs.make_settings(folder)
    return folder


@pytest.mark.parametrize("line, says", [(line, says) for line, *says in SETTINGS])
def test_a_setting_that_cannot_work(settings, monkeypatch, capsys, line, says):
    """Told before torch is needed."""
    monkeypatch.chdir(settings)
    monkeypatch.setattr(program, "_GRACE_SECONDS", 0.0)
    arguments, variables = split(line)
    kept = {name: value for name, value in os.environ.items() if name not in RANKS}
    with mock.patch.dict(os.environ, kept | variables, clear=True):
        start = time.monotonic()
        status = program.main(arguments)
    out, err = capsys.readouterr()
    check(Ended(status, out, err, time.monotonic() - start, (settings / "runs").exists()), says)
    assert not list(settings.glob(".hybrid_grpo_*"))


@pytest.mark.process
@pytest.mark.parametrize("line, says", [(line, says) for line, *says in LOADED])
def test_an_input_that_cannot_work(loaded, line, says):
    check(loaded[line], says)


@pytest.mark.process
@pytest.mark.parametrize("line, says", [(line, says) for line, *says in FOUND_BY_LOADING])
def test_weights_that_cannot_work(loaded, line, says):
    check(replace(loaded[line], left=False), says)


@pytest.mark.process
def test_code_of_a_model_is_not_run(loaded, workshop):
    assert not (workshop.folder / "code_has_run").exists()


class FullDisk(io.StringIO):
    def flush(self) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_output_that_cannot_be_written_is_told(settings, monkeypatch, capsys):
    monkeypatch.chdir(settings)
    monkeypatch.setattr(sys, "stdout", FullDisk())
    assert program.main(["train", "--config", "train.yaml", "--print_config"]) == 2
    assert "standard output cannot be written: No space left on device" in capsys.readouterr().err
