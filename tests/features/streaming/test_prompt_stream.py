"""Prompts that are drawn from a stream: the same on any number of ranks, and after a resume at any place."""

import copy
import json

import pytest
from char_tokenizer import TEMPLATE, char_tokenizer

from hybrid_grpo.config import BatchPlan, DataConfig
from hybrid_grpo.config.errors import RunStopped, UserError
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.features.streaming.prompt_stream import PromptStream, StreamLoader
from hybrid_grpo.records.metrics.meter import Meter

ROWS = [{"prompt": f"{number}=", "answer": number} for number in range(30)]


@pytest.fixture
def data(tmp_path):
    """Writes rows, gives a configuration that streams them."""

    def config(rows: list[dict], name: str = "rows.jsonl", **settings) -> DataConfig:
        path = tmp_path / name
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return DataConfig(path=str(path), **settings)

    return config


def stream(config: DataConfig, seed: int = 0, check=lambda prompts: None, template=None, block=8) -> PromptStream:
    return PromptStream(config, char_tokenizer(template), seed, check, block)


def loader(
    config: DataConfig, world: int = 1, rank: int = 0, batch: int = 6, minibatches: int = 1, seed: int = 0, block=8
):
    return StreamLoader(stream(config, seed, block=block), BatchPlan(world, batch // world, 4, minibatches, 1), rank)


def drawn(prompts: list[Prompt]) -> list[tuple]:
    return [(prompt.id, prompt.epoch, prompt.columns["answer"]) for prompt in prompts]


def steps(opened: StreamLoader, count: int, minibatches: int = 1) -> list[tuple]:
    return [drawn(opened.next_prompts(minibatches)) for _ in range(count)]


@pytest.mark.parametrize("minibatches", [1, 2])
def test_what_is_drawn_does_not_depend_on_the_number_of_ranks(data, minibatches):
    config = data(ROWS)
    alone = loader(config, batch=12, minibatches=minibatches)
    whole = steps(alone, 8, minibatches)
    for world in (2, 3):
        ranks = [loader(config, world, rank, 12, minibatches) for rank in range(world)]
        each, share = [steps(one, 8, minibatches) for one in ranks], 12 // world // minibatches
        for step, expected in enumerate(whole):
            parts = [own[step][m * share : (m + 1) * share] for m in range(minibatches) for own in each]
            assert [item for part in parts for item in part] == expected
        assert all(one.state_dict() == alone.state_dict() for one in ranks)
    # Every row once a pass, those of a block before those of the next, unlike in another pass or with another seed.
    passes = [[item for step in whole for item in step if item[1] == epoch] for epoch in range(3)]
    for epoch in passes:
        assert sorted(number for number, _, _ in epoch) == list(range(30))
        assert [number // 8 for number, _, _ in epoch] == sorted(number // 8 for number in range(30))
    other = [item for step in steps(loader(config, seed=1), 5) for item in step]
    assert len({tuple(number for number, _, _ in epoch) for epoch in [*passes, other]}) == 4


@pytest.mark.parametrize("taken", [1, 3, 4, 5, 7, 8, 15, 16, 17])
def test_a_saved_position_goes_on_alike_on_any_number_of_ranks(data, taken):
    """In the middle of a block of 8, at its end, and behind the end of a pass of 30; one row in ten is too long."""
    rows = [{**row, "prompt": "a" * 9} if row["answer"] % 10 == 7 else row for row in ROWS]
    config = data(rows, max_prompt_tokens=4)
    opened = loader(config, batch=2)
    steps(opened, taken)
    state = json.loads(json.dumps(opened.state_dict()))
    ahead = [item for step in steps(opened, 18) for item in step]
    for world in (1, 2, 3):
        ranks = [loader(config, world, rank, 6) for rank in range(world)]
        for one in ranks:
            one.next_prompts(1)  # a stale position must not show through
            one.load_state_dict(state)
        assert [item for _ in range(6) for one in ranks for item in drawn(one.next_prompts(1))] == ahead
    # As it is kept for a step that is abandoned: no later draw changes it.
    before = copy.deepcopy(opened.state_dict())
    steps(opened, 3)
    opened.load_state_dict(before)
    assert opened.state_dict() == before


def test_numbers_count_passes_rows_and_those_that_were_dropped(data):
    rows = [*ROWS[:4], {"prompt": "a" * 9, "answer": 0}, {"prompt": "b" * 9, "answer": 0}]
    opened, meter = loader(data(rows, max_prompt_tokens=4, shuffle=False), batch=4), Meter()
    for step in range(3):
        assert steps(opened, 1) == [[(number, step, number) for number in range(4)]]
        meter.update(opened.numbers())
        numbers = meter.reduce()
        counts = {"data/epoch": step, "data/streamed_rows": 4 + 6 * step, "data/over_long_rows": 2 * step}
        counts["progress/completions"] = 16 * (step + 1)
        assert {name: numbers[name] for name in counts} == counts


def test_columns_are_those_of_the_first_block_in_every_row(data):
    rows = [*ROWS[:7], {**ROWS[7], "hint": "a"}, {"prompt": "8=", "more": 1}]
    prompts = loader(data(rows), batch=9).next_prompts(1)
    assert {tuple(prompt.columns) for prompt in prompts} == {("answer", "hint")}
    assert [prompt.columns for prompt in prompts if prompt.text == "8="] == [{"answer": None, "hint": None}]


def test_a_task_reads_the_rows_and_ids_name_shards(data, tmp_path):
    """Files of one folder, as a task reads them."""
    for number in range(2):
        rows = [{"word": word} for word in (["ba", "dc"], ["fe", "hg"])[number]]
        (tmp_path / "files").mkdir(exist_ok=True)
        data(rows, f"files/train-{number}.jsonl")
    opened = loader(DataConfig(path=str(tmp_path / "files"), task="letters"), batch=4)
    prompts = {prompt.id: (prompt.text, prompt.columns["answer"]) for prompt in opened.next_prompts(1)}
    assert prompts == {0: ("ba=", "ab"), 1: ("dc=", "cd"), 10**9: ("fe=", "ef"), 10**9 + 1: ("hg=", "gh")}


def test_the_line_says_what_was_looked_at(data):
    rows = [{"prompt": "a" * (1 + number % 5)} for number in range(1200)]
    config = data(rows, max_prompt_tokens=4, shuffle=False)
    opened = stream(config, block=1100)
    assert opened.fact == (
        "streamed, first block 1100 rows of which 1000 were looked at:"
        f" {config.path} [train]: 800 of 1000 rows kept, 200 dropped for an over-long prompt; prompts of 1 to 4 tokens"
        " (mean 2.5); columns prompt (further ones are left out); planned for prompts of data.max_prompt_tokens 4"
    )
    assert len(opened.prompts) == 800 and opened.longest == 4
    assert "first block 3 rows, which is all, of which 3" in stream(data(ROWS[:3])).fact


@pytest.mark.parametrize(
    ("rows", "settings", "message"),
    [
        ([{"q": "a"}], {}, "^data.prompt_column prompt: .* has no such column"),
        ([{"prompt": "a"}, {"prompt": 3}], {}, r"^data.prompt_column prompt: row 1 \(from 0\) of .*rows.jsonl has 3"),
        ([{"prompt": "aaa"}] * 3, {"max_prompt_tokens": 2}, "^data.max_prompt_tokens 2: all 3 prompts of .* longer"),
        ([{"prompt": "a"}], {"chat_template_kwargs": {"x": 1}}, "^data.chat_template_kwargs x: .* no such variable"),
        ([{"prompt": "a"}], {"task": "letters"}, r"^data.task letters: row 0 \(from 0\) of .*rows.jsonl has no word"),
    ],
)
def test_what_is_wrong_with_the_first_rows_is_told_before_the_run(data, rows, settings, message):
    with pytest.raises(UserError, match=message) as caught:
        stream(data(rows, **settings), template=TEMPLATE)
    assert not isinstance(caught.value, RunStopped)


def test_an_empty_source_is_refused(data):
    with pytest.raises(UserError, match=r"^data.path .* is empty: it has no rows$"):
        stream(data([], "files.jsonl"))


@pytest.mark.parametrize(
    ("later", "message"),
    [
        ({"prompt": 3}, r"^data.prompt_column prompt: row 8 \(from 0\) of .*rows.jsonl has 3: give text"),
        ({"answer": 3}, r"^data.prompt_column prompt: row 8 \(from 0\) of .*rows.jsonl has None: give text"),
        ({"prompt": "zz"}, "^token id of z$"),
    ],
)
def test_a_later_row_that_is_no_prompt_stops_the_run_as_it_was(data, later, message):
    def check(prompts):
        if any("z" in prompt.text for prompt in prompts):
            raise UserError("token id of z")

    opened = StreamLoader(stream(data([*ROWS[:8], later]), check=check), BatchPlan(1, 4, 4, 1, 1), 0)
    steps(opened, 2)
    state = opened.state_dict()
    with pytest.raises(RunStopped, match=message):
        opened.next_prompts(1)
    assert opened.state_dict() == state


def test_a_pass_without_a_prompt_that_is_short_enough_ends_the_search(data):
    """The first block has one; further passes would go on for ever."""
    config = data([{"prompt": "a"}, {"prompt": "bbb"}], max_prompt_tokens=2)
    opened = loader(config, batch=1)
    opened.next_prompts(1)
    with open(config.path, "w") as file:
        file.write('{"prompt": "aaa"}\n{"prompt": "bbb"}\n')
    with pytest.raises(RunStopped, match=r"^data.max_prompt_tokens 2: .* has no shorter prompt in a whole pass"):
        opened.next_prompts(1)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seed": 1}, "^run.seed: the checkpoint was made with 0, this run has 1: resume with the same"),
        ({"shuffle": False}, "^data.shuffle: the checkpoint was made with True, this run has False"),
        ({"block": 9}, "^streaming.block: the checkpoint was made with 8, this run has 9"),
        ({"rows": ROWS[1:]}, r"^data.path: .* has other rows at the place of the checkpoint: resume with the same"),
        ({"rows": ROWS[:10]}, r"^data.path: .* has other rows at the place of the checkpoint"),
        ({"rows": ROWS[:8]}, r"^data.path: .* has other rows at the place of the checkpoint"),
    ],
)
def test_a_position_in_another_stream_is_refused_and_changes_nothing(data, change, message):
    saved = loader(data(ROWS))
    steps(saved, 2)
    settings = {"rows": ROWS, "seed": 0, "block": 8, **change}
    seed, block = settings.pop("seed"), settings.pop("block")
    other = loader(data(**settings), seed=seed, block=block)
    before = other.state_dict()
    with pytest.raises(UserError, match=message):
        other.load_state_dict(saved.state_dict())
    assert other.state_dict() == before
