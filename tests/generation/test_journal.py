"""A rollout that is broken off and made again takes what had been finished from the journal."""

import os
import zlib

import numpy as np
import pytest
from decoders import generate
from tiny_models import pair

from hybrid_grpo.data.batch import Completion
from hybrid_grpo.generation import Journal, Request, Sampling, Stats, stream_key
from hybrid_grpo.model.routing import Routing
from hybrid_grpo.model.support import SamplingMask

SAMPLING = Sampling(max_tokens=12, stop_ids=(3, 4, 5), top_p=0.9, logprobs="mask")
PROMPTS = [[7, 8, 9], [10], [11, 12, 13, 14, 15], [16, 17]]
REQUESTS = [Request(prompt, [stream_key(0, 5, row, k) for k in range(6)]) for row, prompt in enumerate(PROMPTS)]


class Broken(Exception):
    pass


@pytest.fixture(scope="module")
def sample():
    """A decoder with few slots, so that completions end at different times."""
    _, model = pair("qwen2")
    return lambda requests, on_finish: generate(
        model, requests, SAMPLING, max_slots=5, on_finish=on_finish, decode=lambda ids: "é\n" + " ".join(map(str, ids))
    )


def broken_off(journal, sample, after):
    seen = []

    def finished(request, k, completion):
        if len(seen) == after:
            raise Broken
        seen.append((request, k, completion))

    with pytest.raises(Broken):
        journal.complete(5, REQUESTS, finished, sample)
    return seen


def test_a_conversation_comes_back_whole(tmp_path):
    said = ({"role": "assistant", "content": "a\n"}, {"role": "tool", "content": "é"})
    support = SamplingMask.of([np.array(ids) for ids in ([7], [3, 60_000], [1, 9, 200_000])])
    routing = Routing(np.full((1, 2, 3), 255, np.uint8), np.arange(24, dtype=np.int16).reshape(4, 2, 3) * 11)
    others = {"calls": (("user", True),), "sidecars": (support, routing)}
    completion = Completion([7, 3, 9], [-0.5, -0.25, -1.0], "stop", "é", ((2, [5, 6]),), said, **others)
    request = Request([1], [11], max_total_tokens=9)

    def sample(requests, on_finish):
        on_finish(0, 0, completion)
        return [[completion]], Stats()

    Journal(tmp_path, 0).complete(1, [request], None, sample)
    groups, _ = Journal(tmp_path, 0).complete(1, [request], None, lambda requests, on_finish: ([], Stats()))
    assert groups == [[completion]]
    for array, expected in zip(groups[0][0].sidecars[1].arrays(), routing.arrays(), strict=True):
        assert array.dtype == expected.dtype
    assert completion.read_ids == [7, 3, 5, 6, 9] and completion.sampled_places == [0, 1, 4]


@pytest.mark.parametrize("ranks_before", [1, 3])
def test_what_was_finished_is_not_sampled_again_and_nothing_differs(tmp_path, sample, ranks_before):
    whole, of_whole = sample(REQUESTS, lambda *_: None)
    for rank in range(ranks_before):
        # Later ranks find what the ones before have left, and get a little further.
        broken_off(Journal(tmp_path, rank), sample, 8 + 2 * rank)
    heard = {}
    resumed = Journal(tmp_path, 0)
    groups, stats = resumed.complete(5, REQUESTS, lambda r, k, c: heard.update({(r, k): c}), sample)
    assert groups == whole and all(c.sidecars for group in groups for c in group)
    assert heard == {(r, k): c for r, group in enumerate(whole) for k, c in enumerate(group)}
    assert len(list(tmp_path.glob("step_000005.rank_*"))) == ranks_before
    assert 0 < stats.rows < of_whole.rows
    # All are known now: nothing is decoded, also where another prompt is asked for first.
    again, stats = Journal(tmp_path, 1).complete(5, REQUESTS[::-1], None, sample)
    assert again == whole[::-1] and stats.rows == 0


def test_another_step_or_key_knows_nothing_and_old_steps_are_forgotten(tmp_path, sample):
    journal = Journal(tmp_path, 0)
    journal.complete(5, REQUESTS, None, sample)
    others = [Request(request.prompt_ids, [key + 1 for key in request.keys]) for request in REQUESTS]
    _, stats = journal.complete(6, others, None, sample)
    assert stats.rows > 0 and {path.name[:11] for path in tmp_path.iterdir()} == {"step_000005", "step_000006"}
    journal.forget(5)
    assert [path.name for path in tmp_path.iterdir()] == ["step_000006.rank_0"]
    journal.clear()
    assert not tmp_path.exists()


@pytest.mark.parametrize("damage", ["cut", "flipped", "binary"])
def test_a_damaged_line_is_sampled_again(tmp_path, sample, damage):
    whole, _ = Journal(tmp_path, 0).complete(5, REQUESTS, None, sample)
    (file,) = tmp_path.iterdir()
    data = bytearray(file.read_bytes())
    if damage == "cut":
        del data[-40:]
    elif damage == "flipped":
        data[len(data) // 2] ^= 1
    else:
        data[100:300] = bytes(range(200))
    file.write_bytes(data)
    groups, stats = Journal(tmp_path, 0).complete(5, REQUESTS, None, sample)
    assert groups == whole and stats.rows > 0
    # What was sampled again stands behind the damage, in lines of its own.
    assert Journal(tmp_path, 0).complete(5, REQUESTS, None, sample)[1].rows == 0


def test_a_folder_that_cannot_be_written_is_said_once_and_the_rollout_goes_on(tmp_path, sample):
    (tmp_path / "file").touch()
    journal = Journal(tmp_path / "file", 0)
    with pytest.warns(UserWarning, match="finished completions are not kept: File exists") as said:
        groups, _ = journal.complete(5, REQUESTS, None, sample)
    # Others may warn too: of sockets of an earlier test that are collected just now.
    assert sum(warning.category is UserWarning for warning in said) == 1
    assert groups == sample(REQUESTS, lambda *_: None)[0]


def test_completions_of_other_weights_are_not_known(tmp_path, sample):
    """A run that was killed after it had gone back took completions of before for its own."""
    for identity, rows in (("0", True), ("1", True), ("0", False)):
        journal = Journal(tmp_path, 0)
        journal.bind(identity)
        assert bool(journal.complete(5, REQUESTS, None, sample)[1].rows) is rows
    # The step is made again after the run has gone back.
    journal.bind("2")
    assert journal.complete(5, REQUESTS, None, sample)[1].rows


@pytest.mark.parametrize("text", ["{}", "[]", "3", '{"tokens": "AA", "key": 1}', "[" * 10**5])
def test_a_record_that_is_none_is_sampled_again(tmp_path, sample, text):
    """Its checksum is right, as another version may have written it."""
    (tmp_path / "step_000005.rank_0").write_text(f"{zlib.crc32(text.encode()):08x} {text}\n")
    assert Journal(tmp_path, 0).complete(5, REQUESTS[:1], None, sample)[1].rows


def test_the_file_is_opened_once_for_a_rollout_and_holds_what_is_finished_at_once(tmp_path):
    """An open file for each completion, with two files in the format of numpy inside, took a tenth of a step."""
    before, sizes = len(os.listdir("/proc/self/fd")), []

    def sample(requests, on_finish):
        for k in range(3):
            on_finish(0, k, Completion([k], [-0.5], "stop"))
            sizes.append(next(tmp_path.iterdir()).stat().st_size)
            assert len(os.listdir("/proc/self/fd")) == before + 1
        return [[Completion([k], [-0.5], "stop") for k in range(3)]], Stats()

    Journal(tmp_path, 0).complete(1, [Request([1], [11, 12, 13], max_total_tokens=9)], None, sample)
    assert 0 < sizes[0] < sizes[1] < sizes[2] and len(os.listdir("/proc/self/fd")) == before
