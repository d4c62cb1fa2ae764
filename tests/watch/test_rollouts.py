import json

import pytest

from hybrid_grpo.watch.rollouts import Query, group_of, read_row, search

ROWS = {
    1: [("sort dcab", "abcd", 1.0, "stop"), ("sort dcab", "dcba", 0.0, "length"), ("sort xy", "Über x", None, "stop")],
    3: [("sort dcab", "ABCD", 0.5, "stop"), ("sort zz", "", 0.0, "length")],
}


@pytest.fixture
def files(tmp_path):
    for step, rows in ROWS.items():
        names = ("prompt", "completion", "reward", "finish")
        lines = [{**dict(zip(names, row, strict=True)), "prompt_id": place} for place, row in enumerate(rows)]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (tmp_path / f"step_{step:06d}.jsonl").write_text("\x00broken\n" + text)
    return {step: tmp_path / f"step_{step:06d}.jsonl" for step in ROWS}


@pytest.mark.parametrize("query, found", [
    (Query(), [(3, "ABCD"), (3, ""), (1, "abcd"), (1, "dcba"), (1, "Über x")]),
    (Query(text="abcd"), [(3, "ABCD"), (1, "abcd")]), (Query(text="DCAB"), [(3, "ABCD"), (1, "abcd"), (1, "dcba")]),
    (Query(text="ÜBER"), [(1, "Über x")]), (Query(finish="length"), [(3, ""), (1, "dcba")]),
    (Query(least=0.5), [(3, "ABCD"), (1, "abcd")]), (Query(least=0, most=0.5), [(3, "ABCD"), (3, ""), (1, "dcba")]),
    (Query(first=2), [(3, "ABCD"), (3, "")]), (Query(last=2, text="x"), [(1, "Über x")]), (Query(first=4), []),
    (Query(prompt=1), [(3, ""), (1, "dcba")]),
])  # fmt: skip
def test_what_fits_is_found_newest_step_first(files, query, found):
    answer = search(files, query)
    assert [(row["step"], row["completion"]) for row in answer.rows] == found
    assert answer.next is None
    for row in answer.rows:
        assert (read_row(files[row["step"]], row["offset"]) or {})["completion"] == row["completion"]


@pytest.mark.parametrize(("limits", "at_least"), [({"limit": 1}, 2), ({"seconds": 0.0}, 5)])
def test_a_search_that_is_cut_goes_on_where_it_was(files, limits, at_least):
    """Whether it found enough, after which a step is read to its end, or took too long."""
    rows, start, turns = [], None, 0
    while True:
        answer = search(files, Query(text="sort"), start, **limits)
        rows += answer.rows
        start, turns = answer.next, turns + 1
        if start is None:
            break
    assert [row["completion"] for row in rows] == ["ABCD", "", "abcd", "dcba", "Über x"]
    assert turns >= at_least


def test_long_texts_are_shown_around_the_searched_words(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    long = "a" * 5000 + " needle " + "b" * 5000
    path.write_text(json.dumps({"prompt": [{"role": "user", "content": long}], "completion": long}) + "\n")
    (row,) = search({1: path}, Query(text="NEEDLE")).rows
    for text in (row["prompt"], row["completion"]):
        assert "needle" in text
        assert len(text) < 250
    (row,) = search({1: path}, Query()).rows
    assert row["completion"].startswith("aaa")


def test_what_a_tool_said_is_found(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    messages = [{"role": "assistant", "tool_calls": []}, {"role": "tool", "content": "It is raining"}]
    path.write_text(json.dumps({"prompt": "p", "completion": "c", "messages": messages}) + "\n")
    assert len(search({1: path}, Query(text="raining")).rows) == 1
    assert search({1: path}, Query(text="snowing")).rows == []


def test_a_place_between_two_lines_or_in_a_file_that_is_gone_has_no_completion(files, tmp_path):
    assert read_row(files[1], 10) is None
    assert read_row(files[1], 10**9) is None
    assert read_row(tmp_path / "gone.jsonl", 0) is None
    assert search({1: tmp_path / "gone.jsonl"}, Query()).rows == []


@pytest.mark.parametrize("order, found", [
    (("reward", False), ["abcd", "ABCD", "", "dcba", "Über x"]),
    (("reward", True), ["", "dcba", "ABCD", "abcd", "Über x"]),
])  # fmt: skip
def test_the_best_and_the_worst_are_found_among_all_and_not_only_the_newest(files, order, found):
    assert [row["completion"] for row in search(files, Query(), order=order, limit=9).rows] != [], "all fit"
    for limit in (1, 2, 3, 4):
        rows = search(files, Query(), order=order, limit=limit).rows
        assert [row["completion"] for row in rows] == found[:limit]


def test_a_conversation_is_listed_by_its_last_words(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    said = [{"role": "assistant", "content": "let me look"}, {"role": "tool", "content": "7"}]
    said += [{"role": "assistant", "content": "it is 7"}, {"role": "assistant", "content": None, "tool_calls": []}]
    path.write_text(json.dumps({"prompt": "p", "completion": "let me look", "messages": said}) + "\n")
    (row,) = search({1: path}, Query()).rows
    assert (row["turns"], row["completion"]) == (4, "it is 7")
    (row,) = search({1: path}, Query(text="let me")).rows
    assert "let me look" in row["completion"]


def test_groups_are_whole_and_bring_their_rewards_whatever_was_searched(tmp_path):
    """Of each prompt the list showed the beginning, which is the same system prompt everywhere, and equal completions
    again and again."""
    path = tmp_path / "step_000001.jsonl"
    prompt = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "2 + 2?"}]
    rows = [
        {
            "group": at // 4,
            "prompt": prompt,
            "prompt_id": 7,
            "completion": "4" if at % 4 else "5",
            "reward": at % 4 and 1.0,
        }
        for at in range(40)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    (row, *_) = found = search({1: path}, Query(text="5")).rows
    assert len(found) == 10 and (row["prompt"], row["prompt_id"], row["rewards"]) == ("2 + 2?", 7, [0, 1.0, 1.0, 1.0])
    (row, *_) = search({1: path}, Query(text="BRIEF")).rows
    assert row["prompt"] == "Be brief.\n\n2 + 2?"
    first = search({1: path}, Query(), limit=1)
    assert (len(first.rows), first.next[0]) == (8, 1), "five times as many are enough, and then the end of the group"
    assert len({row["same"] for row in first.rows}) == 2
    assert len(search({1: path}, Query(), first.next, limit=1).rows) == 8


def test_a_group_has_all_completions_of_its_prompt(tmp_path):
    path = tmp_path / "step_000001.jsonl"
    rows = [
        {"group": at // 2, "sample": at % 2, "completion": f"c{at}", "reward": [0.5, None][at % 2]} for at in range(6)
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    third = search({1: path}, Query()).rows[3]
    group = group_of(path, third["offset"])
    assert [(row["completion"], row["reward"]) for row in group] == [("c2", 0.5), ("c3", None)]
    assert group[1]["offset"] == third["offset"] and group_of(path, third["offset"] + 1) == []
