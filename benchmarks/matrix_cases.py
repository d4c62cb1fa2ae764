"""The settings that matrix.py combines, the pairs that are refused, and the task."""

import json
import random
import string
import sys
from itertools import combinations, product
from pathlib import Path
from typing import Any

import yaml

ROOT = Path(__file__).parent.parent
sys.path += [str(ROOT / "training_scripts"), str(ROOT / "tests" / "support")]

Settings = dict[str, Any]
"""Values of a configuration by their dotted names."""
Choice = tuple[str, str]
"""A dimension and one of its values."""
Pair = frozenset[Choice]
Case = dict[str, str]
"""A value of every dimension."""

SUPPORT, OBJECTIVES = ROOT / "tests" / "support", ROOT / "training_scripts" / "objectives"
_TOOLS = {"rollout.tools": [f"{SUPPORT}/slow_tools.py:look_up"]}
_TURNS = {"rollout.max_turns": 3, "rollout.max_tool_tokens": 12}
_STEPS = {"rewards": [{"function": "answers.py:pieces"}]}
DIMENSIONS: dict[str, dict[str, Settings]] = {
    "ranks": {"1": {}, "2": {}, "3": {}},
    "zero": {stage: {"engine.zero_stage": int(stage)} for stage in "3210"},
    "dtype": {"float32": {"policy.dtype": "float32"}, "bfloat16": {"policy.dtype": "bfloat16"}},
    "rows": {
        "packed": {"policy.shared_prefix": "off"},
        "shared": {"policy.shared_prefix": "on"},
        "padded": {"policy.attn_implementation": "sdpa"},
    },
    "kl": {
        "none": {},
        "loss": {"grpo.beta": 0.1},
        "target": {"grpo.beta": 0.1, "grpo.kl_target": 0.01, "grpo.kl_unbiased": True},
        "refreshed": {"grpo.beta": 0.1, "grpo.kl_estimator": "k2", "grpo.ref_every": 1, "grpo.ref_mix": 0.5},
        "reward": {"grpo.beta": 0.1, "grpo.kl_in": "reward", "grpo.kl_estimator": "k1"},
    },
    "passes": {
        "1": {},
        "2 minibatches": {"grpo.num_minibatches": 2},
        "2 iterations": {"grpo.num_iterations": 2},
        "2 x 2": {"grpo.num_minibatches": 2, "grpo.num_iterations": 2},
    },
    "loss": {
        "clip": {},
        "dual clip": {"grpo.dual_clip": 3.0, "grpo.epsilon_high": 0.28},
        "gspo": {"grpo.importance": "sequence", "grpo.epsilon_low": 3e-4, "grpo.epsilon_high": 4e-4},
        "cispo": {"grpo.surrogate": "cispo", "grpo.epsilon_high": 4.0, "grpo.entropy_coef": 0.01},
        "dppo": {"grpo.surrogate": "dppo_kl", "grpo.entropy_target": 1.0, "grpo.off_policy_mask": 0.1},
        "own": {"grpo.objective": f"{OBJECTIVES}/vespo.py:vespo"},
        "of whole groups": {"grpo.objective": f"{OBJECTIVES}/tpo.py:tpo", "grpo.whole_groups": True},
    },
    "average": {name: {"grpo.loss_type": name} for name in ("dapo", "grpo", "dr_grpo")},
    "baseline": {
        "group": {},
        "batch": {"grpo.scale_rewards": "batch"},
        "leave one out": {"grpo.baseline": "leave_one_out", "grpo.scale_rewards": "none"},
        "gdpo": {"grpo.combine_rewards": "normalize", "grpo.scale_rewards": "batch"},
        "optimal": {"grpo.baseline": "optimal", "grpo.scale_rewards": "mean"},
    },
    "steps": {
        "none": {},
        "to go": _STEPS,
        "their own": {**_STEPS, "grpo.step_discount": 0.0},
        "normalized": {**_STEPS, "grpo.step_credit": "normalized"},
    },
    "tokens": {
        "all": {},
        "uncertain": {"grpo.tokens": "top_entropy"},
        "some left out": {"grpo.tokens": "clip_cov", "grpo.tokens_share": 0.1, "grpo.cov_low": -1.0},
        "some held": {"grpo.tokens": "kl_cov", "grpo.drift_coef": 0.1, "grpo.drift": "absolute"},
    },
    "old log-probabilities": {
        "sampler": {},
        "filtered": {"rollout.logprobs": "sampling", "rollout.top_k": 30},
        "with its mask": {"rollout.logprobs": "mask", "rollout.top_p": 0.9, "rollout.logit_bias": {}},
        "truncated": {"grpo.sampler_correction": "truncate"},
        "masked": {"grpo.sampler_correction": "mask"},
        "band": {"grpo.sampler_correction": "band", "grpo.sampler_normalize": True},
    },
    "cut": {
        "learned": {},
        "masked": {"grpo.mask_truncated": True},
        "punished": {"grpo.overlong_buffer": 4},
    },
    "adapters": {"none": {}, "lora": {"lora.rank": 2}},
    "teacher": {
        "none": {},
        "advantage": {"teacher.model": "other"},
        "loss": {"teacher.model": "other", "teacher.into": "loss", "teacher.offload": False},
        "itself": {
            **{"teacher.prompt_column": "hint", "teacher.into": "loss", "teacher.top_k": 4},
            **{"teacher.divergence": "jsd", "teacher.clamp": 0.5},
        },
    },
    "guests": {
        "none": {},
        "learned": {"guests.writers": [{"name": "file", "path": "guests.jsonl", "weight": "importance"}]},
        "compared": {"guests.writers": [{"name": "large", "model": "other", "weight": "baseline"}]},
    },
    "turns": {
        "one": {},
        "tool": {**_TOOLS, **_TURNS},
        "environment": {"rollout.environment": f"{SUPPORT}/slow_tools.py:Repeats", **_TURNS},
        "agent": {"rollout.agent": "answers.py:agent", **_TURNS},
    },
    "groups": {"as drawn": {}, "replaced": {"grpo.dynamic_sampling": True, "grpo.max_resamples": 2}},
    "curriculum": {
        "none": {},
        "difficulty": {"curriculum.sampling": "difficulty"},
        "solved left out": {"curriculum.skip_above": 0.5},
    },
    "carry": {"none": {}, "a fifth": {"rollout.carry": 0.2}},
    "sampling": {
        "plain": {},
        "filtered": {"rollout.temperature": 0.8, "rollout.min_p": 0.05},
        "changed": {"rollout.repetition_penalty": 1.2, "rollout.min_completion_tokens": 2},
    },
    "decoder": {
        "paged": {},
        "4 slots": {"rollout.max_slots": 4},
        "generate()": {"rollout.decoder": "transformers"},
    },
    "memory": {
        "plain": {},
        "offload": {"engine.offload_optimizer": True},
        "checkpointing": {"policy.gradient_checkpointing": True},
    },
    "alarms": {
        "none": {},
        "skip": {
            "alarms.failing_rewards": {"above": 0.1, "patience": 1, "action": "skip"},
            "rewards": [{"function": "answers.py:fails_in_step_2"}],
            "scoring.max_failed_frac": 1.0,
        },
    },
    "balance": {"auto": {}, "off": {"grpo.balance": "off"}},
    "schedule": {
        "constant": {},
        "cosine": {"policy.lr_schedule": "cosine", "policy.warmup_steps": 1, "policy.weight_decay": 0.1},
    },
    "checkpoints": {
        "every step": {},
        "waited for": {"checkpoint.asynchronous": False},
        "every second": {"checkpoint.every": 2},
        "first and last": {"checkpoint.every": 0},
    },
    "evaluation": {"none": {}, "every step": {"data.eval_path": "heldout.jsonl", "eval.every": 1}},
}
_ANY = ""
REFUSED = [
    ("zero", "0", "dtype", "bfloat16"),
    ("zero", "0", "memory", "offload"),
    ("kl", "refreshed", "adapters", "lora"),
    ("kl", "reward", "guests", _ANY),
    ("teacher", "advantage", "guests", _ANY),
    ("baseline", "optimal", "old log-probabilities", "with its mask"),
    ("tokens", "some held", "guests", "learned"),
    ("teacher", "itself", "turns", "environment"),
    ("teacher", _ANY, "turns", "agent"),
    ("decoder", "generate()", "turns", "agent"),
    ("old log-probabilities", "with its mask", "turns", "agent"),
    ("guests", _ANY, "turns", _ANY),
    ("guests", "learned", "loss", "of whole groups"),
    ("guests", "learned", "old log-probabilities", "with its mask"),
    ("baseline", "gdpo", "steps", "their own"),
    ("baseline", "gdpo", "steps", "normalized"),
    ("carry", _ANY, "turns", _ANY),
    ("carry", _ANY, "guests", _ANY),
    ("carry", _ANY, "groups", _ANY),
    ("carry", _ANY, "decoder", "generate()"),
    ("carry", _ANY, "old log-probabilities", "filtered"),
    ("sampling", "changed", "old log-probabilities", "with its mask"),
]
"""Values that cannot be combined; _ANY stands for all values of a dimension except its first."""
LATE = frozenset({("baseline", "gdpo"), ("steps", "to go")})
"""A pair that is refused too, but after the first rollout: only then are there rewards of steps."""
RECIPE: dict[str, Any] = {
    "run": {"name": "run", "steps": 3, "resume": "auto"},
    "policy": {"model": "model", "lr": 1e-3, "micro_batch_tokens": 48},
    "engine": {"adam": "torch"},
    "data": {"path": "rows.jsonl", "max_prompt_tokens": 40},
    "rollout": {"prompts_per_step": 12, "num_generations": 4, "max_completion_tokens": 12},
    "rewards": ["answers.py:early", "answers.py:short"],
    "checkpoint": {"every": 1},
    "log": {"wandb": "disabled"},
}
ANSWERS = """
def early(completions, **columns):
    return [float("".join(m["content"] for m in c)[:1] in tuple("abcdefghijklm")) for c in completions]


def short(completions, **columns):
    return [1 / (1 + sum(len(m["content"]) for m in c)) for c in completions]


def fails_in_step_2(completions, trainer_state, **columns):
    rewards = short(completions)
    return [float("nan")] * len(rewards) if trainer_state.global_step == 1 else rewards


def pieces(completion_ids, **columns):
    return [[(end, ids[end - 1] % 3 / 2) for end in range(1, len(ids) + 1, 2)] for ids in completion_ids]


async def agent(task, client):
    messages = [*task["prompt"]]
    for _ in range(3):
        made = await client.chat.completions.create(model="policy", messages=messages, max_tokens=4)
        said = made.choices[0].message.content
        answered = [{"role": "assistant", "content": said}, {"role": "user", "content": said[::-1][:3]}]
        messages = [*messages, *answered] if len(said) % 2 else messages[:1]
"""


def pairs() -> dict[Pair, bool]:
    """All pairs of values of two dimensions, and whether they can be combined."""

    def fits(choice: Choice, dimension: str, value: str) -> bool:
        first = next(iter(DIMENSIONS[dimension]))
        return choice[0] == dimension and (choice[1] == value if value else choice[1] != first)

    found = {}
    for (one, its), (other, theirs) in combinations(DIMENSIONS.items(), 2):
        for a, b in product(its, theirs):
            pair = (one, a), (other, b)
            found[frozenset(pair)] = set(pair) != LATE and not any(
                fits(pair[k], *rule[:2]) and fits(pair[1 - k], *rule[2:]) for rule in REFUSED for k in (0, 1)
            )
    return found


def refused_pairs() -> list[Pair]:
    """The pairs that are refused before a model loads."""
    return [pair for pair, possible in pairs().items() if not possible and pair != LATE]


def arguments(case: Case) -> list[str]:
    """The settings of a case as command line arguments."""
    chosen = [(k, v) for dimension, value in case.items() for k, v in DIMENSIONS[dimension][value].items()]
    settings = dict(chosen)
    if "rewards" in settings:
        settings["rewards"] = [*RECIPE["rewards"], *(reward for k, v in chosen if k == "rewards" for reward in v)]
    return [f"--{name}={value if isinstance(value, str) else json.dumps(value)}" for name, value in settings.items()]


def make_task(folder: Path) -> None:
    """Two tiny models with a chat template, prompts of ragged lengths, and the files that settings name."""
    import torch
    from lookup_task import CALL, CALLED, make_tokenizer
    from transformers import Qwen2Config, Qwen2ForCausalLM

    tokenizer, draw = make_tokenizer(), random.Random(0)
    for seed, name in enumerate(("model", "other")):
        torch.manual_seed(seed)
        config = Qwen2Config(
            **{"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2},
            **{"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 128},
            **{"tie_word_embeddings": True, "initializer_range": 0.1, "bos_token_id": None},
            **{"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id},
        )
        Qwen2ForCausalLM(config).save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)

    def word(longest: int) -> str:
        return "".join(draw.choices(string.ascii_lowercase, k=draw.randint(1, longest)))

    def asked(text: str) -> list[dict[str, str]]:
        return [{"role": "user", "content": text}]

    ids = dict(tokenizer.get_vocab())
    bias = {ids[CALL]: 3.0, ids[CALLED]: 4.0, ids["<|im_end|>"]: 2.5}
    recipe = {**RECIPE, "rollout": {**RECIPE["rollout"], "logit_bias": {str(k): v for k, v in bias.items()}}}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "answers.py").write_text(ANSWERS)
    prompts = [word(12) for _ in range(24)]
    tables = {
        "rows": [{"prompt": asked(text), "hint": asked(text + word(4))} for text in prompts],
        "heldout": [{"prompt": asked(word(12))} for _ in range(4)],
        "guests": [
            {
                **{"prompt": asked(text), "completion": (said := word(6))},
                **{"token_ids": [*(ids[letter] for letter in said), tokenizer.eos_token_id]},
                "token_logp": [-3.0] * (len(said) + 1),
            }
            for text in prompts[::2]
        ],
    }
    for name, rows in tables.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
