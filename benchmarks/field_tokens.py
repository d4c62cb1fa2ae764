"""Variations of special tokens: tokenizers that add some x templates x prompts x completions; see field.py."""

import json
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from typing import Any

from byte_tokenizers import byte_level, sentencepiece
from tokenizers.processors import TemplateProcessing

from hybrid_grpo.commands.pairs import read_pairs
from hybrid_grpo.config import DataConfig
from hybrid_grpo.data.completions import unended_turn
from hybrid_grpo.data.prompts import read_prompts

_SPECIAL = ["<|im_start|>", "<|im_end|>", "<s>", "</s>", "[CLS]", "[SEP]"]
_CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_TEMPLATES = {
    "chatml": _CHATML,
    "chatml_bos": "{{ bos_token }}" + _CHATML,
    "llama": "{{ bos_token }}{% for m in messages %}{% if m.role == 'user' %}[INST] {{ m.content }} [/INST]"
    "{% else %} {{ m.content }}{{ eos_token }}{% endif %}{% endfor %}",
}
_TOKENIZERS = {"bytes": byte_level, "spaces": sentencepiece}
_BEFORE: list[list[str]] = [[], ["<s>"], ["[CLS]"], ["<s>", "[CLS]"]]
_AFTER: list[list[str]] = [[], ["</s>"], ["[SEP]"], ["<|im_end|>"]]
_PROMPTS: list[Any] = ["1+1=", " 1+1= ", "Ça va? 你好\n", [{"role": "user", "content": "1+1="}]]
_ENDINGS = ["", "{end}", "{end}\n", "{end}{end}", "{end}\n</s>"]


def _tokenizer(kind: str, before: list[str], after: list[str], end: str, template: str) -> Any:
    made = _TOKENIZERS[kind](["a b c 1+1=2 user assistant"])
    made.add_special_tokens({"additional_special_tokens": _SPECIAL})
    made.eos_token, made.bos_token, made.chat_template = end, "<s>", _TEMPLATES[template]
    if added := [(token, made.convert_tokens_to_ids(token)) for token in {*before, *after}]:
        whole = TemplateProcessing(" ".join([*before, "$A", *after]), special_tokens=added)
        made.backend_tokenizer.post_processor = whole
    return made


def _wrong(tokenizer: Any, before: list[str], folder: Path) -> Iterator[tuple[str, str]]:
    chat = tokenizer.apply_chat_template(_PROMPTS[-1], add_generation_prompt=True, tokenize=False)
    prompts, end = [*_PROMPTS, chat], tokenizer.eos_token
    rows = [{"prompt": prompt, "completion": f"2{ending}".format(end=end)} for prompt in prompts for ending in _ENDINGS]
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data, first = DataConfig(path=str(path)), tokenizer.convert_tokens_to_ids(before)
    read = read_prompts(data, tokenizer)[0]
    pairs = read_pairs(data, tokenizer, 64, ends=[tokenizer.eos_token_id])[0]
    rendered = tokenizer(chat, add_special_tokens=False)["input_ids"]
    for row, prompt, pair in zip(rows, read, pairs, strict=True):
        ids, bare = prompt.token_ids, row["prompt"]
        bare = rendered if bare in (chat, _PROMPTS[-1]) else tokenizer(bare, add_special_tokens=False)["input_ids"]
        has = isinstance(row["prompt"], list) or bare[: len(first)] == first
        wanted = bare if has else [*first, *bare]
        target = tokenizer("2", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
        right = ids == wanted == pair.prompt.token_ids and pair.completion_ids == target
        found = [tokenizer.convert_ids_to_tokens(part) for part in (ids, pair.prompt.token_ids, pair.completion_ids)]
        yield f"{row['prompt']!r:.12} {row['completion']!r}", "" if right else f"{found}"


def token_variations(folder: Path) -> Iterator[tuple[str, str]]:
    """Yield the name of each variation, and what is wrong with it."""
    for kind, before, after, end, template in product(_TOKENIZERS, _BEFORE, _AFTER, ("</s>", "<|im_end|>"), _TEMPLATES):
        tokenizer, name = _tokenizer(kind, before, after, end, template), f"{kind}/{before}/{after}/{end}/{template}"
        yield from ((f"{name}/{row}", why) for row, why in _wrong(tokenizer, before, folder))
        ends_turns = end if template == "llama" else "<|im_end|>"
        warned = bool(unended_turn(tokenizer, [tokenizer.eos_token_id], []))
        yield f"{name}/end of turn", "" if warned == (ends_turns != end) else f"warned: {warned}"
