"""The cases of matrix.py: the settings of matrix_cases.yaml, their pairs, those that are refused, and the task."""

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
_FILE = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8").replace("ROOT", str(ROOT)))
DIMENSIONS: dict[str, dict[str, Settings]] = _FILE["dimensions"]
RECIPE: dict[str, Any] = _FILE["recipe"]
LATE = frozenset({("baseline", "gdpo"), ("steps", "to go")})
"""A pair that is refused too, but after the first rollout: only then are there rewards of steps."""
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
        return choice[0] == dimension and (choice[1] != first if value == "any" else choice[1] == value)

    found = {}
    for (one, its), (other, theirs) in combinations(DIMENSIONS.items(), 2):
        for a, b in product(its, theirs):
            pair = (one, a), (other, b)
            found[frozenset(pair)] = set(pair) != LATE and not any(
                fits(pair[k], *rule[:2]) and fits(pair[1 - k], *rule[2:]) for rule in _FILE["refused"] for k in (0, 1)
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
            **{"vocab_size": len(tokenizer), "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2},
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
