"""A training run whose rewards come from a service that misbehaves at random."""

import json
import random
from collections import Counter

import pytest
from hostile_service import Asked, Behaviour, Service, after, answer, drops, hangs_up, says
from workshop import Workshop

pytestmark = pytest.mark.process

TOKEN = "t0ken-0f-a-run"
FLAWS: list[Behaviour] = [
    answer("", "500 Internal Server Error"),
    answer("", "429 Too Many Requests", Retry_After="0"),
    answer("<html>"),
    answer('{"rewards": [NaN]}'),
    says(rewards=[1.0, 2.0, 3.0]),
    says(rewards=["one"]),
    drops,
    hangs_up,
    after(1.0),
]


def is_lost(query: str) -> bool:
    """The service never gives an answer of use for it."""
    return sum(map(ord, query)) % 3 == 0


class Moody:
    """Nothing of use for some completions, and for the others in three of ten times."""

    def __init__(self) -> None:
        self.random = random.Random(0)
        self.flaws: Counter[int] = Counter()

    def __call__(self, connection, asked: Asked) -> None:
        (query,) = asked.body["query"]
        if is_lost(query) or self.random.random() < 0.3:
            flaw = self.random.randrange(len(FLAWS))
            self.flaws[flaw] += 1
            FLAWS[flaw](connection, asked)
        else:
            after(0.05)(connection, asked)


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    workshop = Workshop(tmp_path_factory.mktemp("remote"))
    yield workshop
    workshop.close()


def test_the_run_goes_on_and_counts_what_failed(workshop):
    moody = Moody()
    settings = "retries: 9, backoff_s: 0.0, timeout_s: 0.3, token_env: REWARD_TOKEN, label_column: answer"
    with Service(moody) as service:
        reward = f"[{{function: remote, timeout_s: 30.0, kwargs: {{url: '{service.url}', {settings}}}}}]"
        arguments = "train --config train.yaml --data.eval_path null --run.name moody --eval.every 0"
        done = workshop.run(
            *[*arguments.split(), "--scoring.max_failed_frac", "1.0", "--rewards", reward], REWARD_TOKEN=TOKEN
        )
        assert done.status == 0, done.err
        assert all(asked.headers["authorization"] == f"Bearer {TOKEN}" for asked in service.asked)
        assert {asked.body["labels"][0] for asked in service.asked} > {"abcd", "xyz"}
    assert len(moody.flaws) == len(FLAWS)
    folder = workshop.folder / "runs" / "moody"
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert len(steps) == 4
    for number, step in enumerate(steps, 1):
        lines = (folder / "rollouts" / f"step_{number:06d}.jsonl").read_text().splitlines()
        rows = [json.loads(line) for line in lines]
        queries = [row["prompt"] + row["completion"] for row in rows]
        assert [row["reward"] for row in rows] == [None if is_lost(query) else len(query) for query in queries]
        assert [list(row["failed"]) for row in rows] == [["remote"] if is_lost(query) else [] for query in queries]
        assert step["reward/remote/failed_frac"] == pytest.approx(sum(map(is_lost, queries)) / len(queries))
    assert any(step["reward/remote/failed_frac"] > 0 for step in steps)
    assert "rewards: remote raised RuntimeError: http://127.0.0.1" in done.err and "(attempt 10)" in done.err

    files = [file for file in folder.rglob("*") if file.is_file()]
    assert folder / "config.yaml" in files
    assert not [file for file in files if TOKEN.encode() in file.read_bytes()]
    assert TOKEN not in done.out + done.err
