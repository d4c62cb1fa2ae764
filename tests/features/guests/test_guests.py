"""Guests: what their files must hold, which completions a group is given, and steps with them on ranks."""

import json
import math
import random
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from char_tokenizer import TEMPLATE, char_tokenizer, ids
from cuda_graphs import Captures
from launching import make_task, ranks
from memory_plans import CPU, GPU, SIZES
from tiny_models import build, tiny_config
from tokenizers import decoders

from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig, RunConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Numbers, Prompt, Rollout, Scores
from hybrid_grpo.features.guests import guests as module
from hybrid_grpo.features.guests.guests import GuestMemory, Guests
from hybrid_grpo.features.guests.settings import GuestConfig, GuestsConfig
from hybrid_grpo.features.guests.writers import GuestFile, Learner
from hybrid_grpo.generation import loop
from hybrid_grpo.generation.graphs import bytes_of
from hybrid_grpo.generation.loop import PAGE
from hybrid_grpo.generation.rollout import requests_of
from hybrid_grpo.model.architectures import cached_numbers
from hybrid_grpo.model.loading import load_config, load_tokenizer, parameters_of
from hybrid_grpo.records.metrics.measurements import measure_step
from hybrid_grpo.records.metrics.meter import Meter
from hybrid_grpo.run.memory.plan import Plan

PROGRAMS = str(Path(__file__).with_name("programs.py"))
Seen = dict[str, Any]
EOS = ids("<eos>")[0]
PROMPTS = [Prompt(0, "ab=", [1], {}), Prompt(1, "ba=", [1], {}), Prompt(2, [{"role": "user", "content": "c"}], [1], {})]
AB = {"prompt": "ab=", "completion": "ab", "token_ids": ids("ab", "<eos>"), "token_logp": [-0.5, 0, -2.5]}


@pytest.fixture
def read(tmp_path: Path) -> Callable[..., Guests]:
    """The guests of a run, one from a file of these rows, and others from files of theirs."""
    tokenizer = char_tokenizer()
    tokenizer.backend_tokenizer.decoder = decoders.Fuse()

    def made(*files: list[dict[str, Any]], weight: Any = "importance", **of_guest: Any) -> Guests:
        guests = []
        for number, rows in enumerate(files):
            (tmp_path / f"{number}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            name, path = f"guest{number}", str(tmp_path / f"{number}.jsonl")
            guests.append(GuestConfig(name, weight, path=path, **of_guest))
        config = TrainConfig(
            data=DataConfig(system_prompt=None),
            rollout=RolloutConfig(prompts_per_step=1, num_generations=5, max_completion_tokens=4),
            **{"guests": GuestsConfig(guests)},
        )
        return guests_of(config, tokenizer, PROMPTS, len(tokenizer))

    return made


def guests_of(config: TrainConfig, tokenizer: Any, prompts: list[Prompt], vocabulary: int) -> Guests:
    """The guests of a run whose policy knows so many tokens, loaded on the CPU."""
    sampler = SimpleNamespace(album=None)
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, prompts=prompts, stop_ids=(EOS,), sampler=sampler)
    text = SimpleNamespace(vocab_size=vocabulary)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "load_config", lambda name: SimpleNamespace(get_text_config=lambda: text))
        guests = Guests(config, batch_plan(config, 1), inputs)
    policy: Any = SimpleNamespace(engine=SimpleNamespace(device=torch.device("cpu")))
    guests.load(policy)
    return guests


def given(guests: Guests, step: int = 1, prompts: list[Prompt] = PROMPTS) -> list[list[Completion | None]]:
    """What the groups of a step are given, slot by slot."""
    written = guests.write(prompts, step, lambda: None)
    groups = [
        [written.get(key) for key in request.keys]
        for request in requests_of(prompts, RolloutConfig(num_generations=5), 0, step)
    ]
    assert sum(completion is not None for group in groups for completion in group) == len(written)
    return groups


def test_completions_of_a_file_take_the_last_places_of_their_groups(read):
    """A prompt that the file does not have leaves its place to the policy. One that two files have gets both."""
    several = {"prompt": "ba=", "completions": ["a", "b"], "finish": ["stop", "length"]}
    several |= {"token_ids": [ids("a", "<eos>"), ids("b")], "token_logp": [[-1, -1], [-3]]}
    chat = {"prompt": PROMPTS[2].text, "completion": [{"role": "assistant", "content": "x"}]}
    chat |= {"token_ids": ids("x"), "token_logp": [-1.0]}
    guests = read([AB, several, {**AB, "prompt": "other="}], [chat])
    assert list(guests.facts) == ["guest guest0", "guest guest1"]
    assert guests.facts["guest guest0"].startswith("3 completions of 2 of 3 prompts, from ")
    assert guests.facts["guest guest0"].endswith("; 1 rows have other prompts")
    first, second, third = given(guests)
    ab = Completion(ids("ab", "<eos>"), [-0.5, 0, -2.5], "stop", "ab", writer="guest0", learned=True)
    assert first == [None, None, None, ab, None]
    assert second[3] in (
        Completion(ids("a", "<eos>"), [-1, -1], "stop", "a", writer="guest0"),
        Completion(ids("b"), [-3], "length", "b", writer="guest0"),
    )
    assert third == [None, None, None, None, Completion(ids("x"), [-1.0], "stop", "x", writer="guest1")]


def test_without_weight_in_the_loss_a_text_is_enough(read):
    cut = {"prompt": PROMPTS[2].text, "completions": ["abc"], "finish": ["length"], "token_ids": [[1, 2, 3]]}
    rows = [{"prompt": "ab=", "completion": "ab"}, {"prompt": "ba=", "completion": ""}, cut]
    first, second, third = given(read(rows, weight="baseline"))
    assert first[4] == Completion(ids("ab", "<eos>"), [], "stop", "ab", writer="guest0", learned=False)
    assert second[4] == Completion([EOS], [], "stop", "", writer="guest0", learned=False)
    # Tokens of another tokenizer do not matter, and a completion that was cut does not end.
    assert third[4] == Completion(ids("abc"), [], "length", "abc", writer="guest0", learned=False)


def test_a_text_in_a_chat_ends_with_the_token_of_the_template(tmp_path: Path):
    chat = [{"role": "user", "content": "ab"}]
    (tmp_path / "chat.jsonl").write_text(json.dumps({"prompt": chat, "completion": "c"}))
    tokenizer = char_tokenizer(TEMPLATE.replace("{{ message.content }}", "{{ message.content }}<system>"))
    prompts = [Prompt(0, chat, ids("ab"), {})]
    learner = Learner(TrainConfig(), tokenizer, prompts, (*ids("<eos>"), *ids("<system>")), len(tokenizer))
    guest = GuestFile(GuestConfig("chat", "imitation", path=str(tmp_path / "chat.jsonl")), learner)
    [[completion]] = guest.write(prompts, 1, lambda: None)
    assert completion.token_ids == ids("c", "<system>")


def test_which_completions_a_group_is_given_is_a_matter_of_seed_step_and_prompt(read):
    rows = [{"prompt": "ab=", "completion": letter} for letter in "abcdef"]
    one, again = (read(rows, weight="baseline", per_group=3) for _ in range(2))
    drawn = []
    for step in range(60):
        (group,) = given(one, step, PROMPTS[:1])
        assert group == given(again, step)[0], "neither on other prompts nor on what was drawn before"
        texts = [completion.text for completion in group if completion]
        assert len(set(texts)) == 3 and group[:2] == [None, None]
        drawn += texts
    assert len(Counter(drawn)) == 6 and min(Counter(drawn).values()) > 15, "30 each on average"
    # A prompt may come twice in a step, at the end of one pass over the data and at the beginning of the next.
    passes = [given(one, 1, [replace(PROMPTS[0], epoch=epoch)]) for epoch in range(8)]
    assert any(group != passes[0] for group in passes)


def of_model(folder: Path, architecture: str = "qwen2", per_group: int = 1, **rollout: Any) -> TrainConfig:
    """A policy and a guest that are the same model."""
    char_tokenizer().save_pretrained(folder)
    build(tiny_config(architecture, vocab_size=80)).save_pretrained(folder)
    limits: Any = {"prompts_per_step": 1, "num_generations": 3, "max_completion_tokens": 8, **rollout}
    guest = GuestConfig("large", "importance", model=str(folder), per_group=per_group)
    policy, guests = PolicyConfig(model=str(folder), dtype="float32"), {"guests": GuestsConfig([guest])}
    return TrainConfig(policy=policy, rollout=RolloutConfig(**limits), **guests)


@pytest.mark.parametrize("known, has", [(73, False), (74, True)])
def test_what_a_model_writes_beyond_the_vocabulary_of_the_policy_is_left_out(tmp_path: Path, known: int, has: bool):
    """The policy has no weights for token 73, which this model always writes: a place is left to the policy."""
    config = of_model(tmp_path, max_completion_tokens=2, logit_bias={"73": 1e4})
    guests = guests_of(config, load_tokenizer(str(tmp_path)), PROMPTS[:1], known)
    written = guests.write(PROMPTS[:1], 1, lambda: None)
    assert [completion.token_ids for completion in written.values()] == [[73, 73]] * has


def test_what_a_model_writes_is_a_matter_of_the_seed(tmp_path: Path):
    """Its experts are not the policy's: replayed there, they gave ratios of 300 in place of 1."""
    config = of_model(tmp_path, "qwen3_moe", per_group=2)

    def written(seed: int) -> list[list[int]]:
        guests = guests_of(replace(config, run=RunConfig(seed=seed)), load_tokenizer(str(tmp_path)), PROMPTS[:1], 80)
        completions = guests.write(PROMPTS[:1], 1, lambda: None).values()
        assert not any(completion.sidecars for completion in completions)
        return [completion.token_ids for completion in completions]

    assert written(0) == written(0) != written(1)


@pytest.mark.usefixtures("torch_only")
def test_a_model_captures_its_graphs_once_and_is_planned_with_the_memory_it_keeps(tmp_path: Path, monkeypatch):
    config = of_model(tmp_path, per_group=2, prompts_per_step=2)
    captures = Captures()
    monkeypatch.setattr(loop, "capture_on", lambda _: captures)
    guests = guests_of(config, load_tokenizer(str(tmp_path)), PROMPTS[:2], 80)
    counts = [len(guests.write(PROMPTS[:2], step, lambda: None)) and len(captures.graphs) for step in (1, 2, 3)]
    assert counts == [counts[0]] * 3 and captures.forwards[0] == 4, "two prompts, two completions each"

    weights = 4 * parameters_of(str(tmp_path))
    parts = [
        GuestMemory(config).part(Plan(config, SIZES, batch_plan(config, 1), 4, hardware), on_host=False).bytes
        for hardware in (CPU, GPU)
    ]
    # Four sequences of one page and one to grow into, and two more pages; graphs of 4, 2 and 1 rows.
    numbers = cached_numbers(load_config(str(tmp_path)))
    assert parts == [weights, weights + (4 * 2 + 2) * PAGE * 4 * numbers + bytes_of(4) + 4 * 4 * 80]


@pytest.mark.parametrize("changes, says", [
    ({"token_ids": None}, "has no token_ids and token_logp of equal length"),
    ({"token_logp": None}, "set weight to imitation or baseline"),
    ({"token_logp": [-1.0, -1.0]}, "has no token_ids and token_logp of equal length"),
    ({"token_logp": [-1.0, -1.0, 0.5]}, "has no token_ids and token_logp of equal length"),
    ({"token_logp": [-1.0, -1.0, -(10**400)]}, "has no token_ids and token_logp of equal length"),
    ({"token_logp": [-1.0, -1.0, "x"]}, "has no token_ids and token_logp of equal length"),
    ({"completion": "ba"}, "has token_ids that are not its completion for policy.model"),
    ({"token_ids": [*ids("ab"), 10**6]}, "has token_ids that are not its completion"),
    ({"token_ids": [*ids("ab"), len(char_tokenizer())]}, "has token_ids that are not its completion"),
    ({"completion": "abcd", "token_ids": ids("abcd", "<eos>"), "token_logp": [-1.0] * 5},
     "is a completion of 5 tokens: set rollout.max_completion_tokens 4 to 5 or higher"),
    ({"prompt": "other="}, "none of its 1 prompts is one of data.path"),
    ({"completion": None}, "has neither completion nor completions"),
])  # fmt: skip
def test_a_row_that_does_not_fit(read, changes, says):
    with pytest.raises(UserError, match=says) as refused:
        read([AB | changes])
    assert "\n" not in str(refused.value)
    assert "row 0" in str(refused.value) or "guests.writers guest0: path" in str(refused.value)


def test_the_numbers_of_a_step_are_the_policy_s_own():
    """Equal to those of the same step without guests, but for how many groups teach nothing."""
    draw = random.Random(0)

    def row(guest: str = "") -> Completion:
        tokens = [draw.randrange(50) for _ in range(draw.randint(1, 6))]
        return Completion(tokens, [], draw.choice(["stop", "length"]), writer=guest, learned=not guest)

    prompts = [Prompt(i, "p", [1], {}, source="abc"[i % 3]) for i in range(6)]
    groups = [[*(row() for _ in range(4)), row("large"), row("large" if i else "")] for i in range(6)]
    rollout = Rollout(prompts, [c for group in groups for c in group], 6)
    value_B = torch.tensor([draw.choice([0.0, 1.0]) for _ in range(36)], dtype=torch.float64)
    value_B[:6] = torch.tensor([0, 0, 0, 0, 1, 0])
    scores = Scores(value_B, {"f": value_B}, {"f": torch.zeros(36, dtype=torch.int8)})

    def numbers(measured: Numbers) -> dict[str, float]:
        meter = Meter()
        meter.update(measured)
        return {name: value for name, value in meter.reduce().items() if not name.startswith("memory/")}

    guest = Guests.__new__(Guests)
    guest._guests = [(GuestConfig("large", "baseline", model="m", per_group=2), None)]
    mixed = numbers(measure_step(rollout, scores, "f", 0.5, 4) | guest.measure(rollout, scores))
    alone = numbers(measure_step(rollout.first(4), scores.first(4, 6), "f", 0.5, 4))
    of_guests = {name: mixed.pop(name) for name in list(mixed) if name.startswith("guests/")}
    assert mixed.pop("group/zero_std_frac") < alone.pop("group/zero_std_frac"), "the guest is the only right one"
    assert mixed.pop("group/count") == alone.pop("group/count") == 6
    assert mixed == alone and mixed["reward/mean"] == value_B.view(6, 6)[:, :4].mean()
    rows = [k for k, c in enumerate(rollout.completions) if c.writer]
    assert of_guests == {
        "guests/large/rows": 11,
        "guests/large/missing": 1,
        "guests/large/tokens": sum(rollout.lengths[k] for k in rows),
        "guests/large/reward": value_B[rows].mean(),
    }


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Seen], Seen]:
    """What the ranks of two have seen, and one alone."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    # A model of the same tokenizer and other weights.
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(folder / "model")
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(0.9)
    for part in (model, AutoTokenizer.from_pretrained(folder / "model")):
        part.save_pretrained(folder / "large")
    rows = [json.loads(line) for line in (folder / "train.jsonl").read_text().splitlines()[:100:2]]
    answers = [json.dumps({"prompt": row["prompt"], "completion": row["answer"]}) for row in rows]
    (folder / "answers.jsonl").write_text("\n".join(answers) + "\n")
    two = ranks(2, "two", folder, programs=PROGRAMS)
    (one,) = ranks(1, "one", folder, programs=PROGRAMS)
    return two, one


@pytest.mark.ranks
def test_a_step_with_guests_does_not_depend_on_the_ranks(runs):
    two, one = runs
    for number, alone in enumerate(one["steps"]):
        parts = [seen["steps"][number] for seen in two]
        # Two minibatches of 4 prompts, 2 on each rank, in groups of 5.
        rows = [row for m in range(2) for part in parts for row in part["rows"][10 * m : 10 * m + 10]]
        assert [row[:3] for row in rows] == [row[:3] for row in alone["rows"]]
        assert [row[3:] for row in rows] == [pytest.approx(row[3:], rel=1e-6, abs=1e-6) for row in alone["rows"]]
        for part in parts:
            assert part["metrics"].keys() == alone["metrics"].keys()
            for name in alone["metrics"]:
                assert part["metrics"][name] == pytest.approx(alone["metrics"][name], rel=1e-5, abs=1e-6), name
    first = one["steps"][0]["metrics"]
    assert first["guests/large/rows"] == 8 and first["guests/large/missing"] == 0
    assert 0 < first["guests/seeds/rows"] < 8
    assert first["guests/seeds/rows"] + first["guests/seeds/missing"] == 8
    assert first["guests/seeds/reward"] == 2.0, "right answers, by both functions"
    assert 0.5 < first["guests/large/ratio_mean"] < 2 and first["guests/large/ratio_max"] > 1.01
    assert first["parity/logp_abs_diff_max"] < 1e-5, "the sampler's own tokens"
    assert "guests/seeds/ratio_mean" not in first
    # They are the policy's until its first optimizer step, and more likely before the second.
    assert 1 < first["guests/answers/ratio_mean"] < 1.5 and first["guests/answers/reward"] == 2.0
    assert math.isfinite(first["policy/loss"]) and first["policy/grad_norm"] > 0


@pytest.mark.ranks
def test_a_run_with_guests_goes_on_to_the_bit(runs):
    assert all(seen["resumed"] == seen["steps"][1] for seen in runs[0])


@pytest.mark.ranks
def test_the_policy_samples_as_it_would_without_guests(runs):
    """And in place of a guest that is missing; the guest of another model has a random stream of its own."""
    (first, _), alone = runs[1]["steps"], runs[1]["alone"]
    own = [(row[:1] + row[2:3], other) for row, other in zip(first["rows"], alone, strict=True) if not row[1]]
    assert len(own) > 16 and all(row == other for row, other in own)
    large = [(row[2], other[1]) for row, other in zip(first["rows"], alone, strict=True) if row[1] == "large"]
    assert len(large) == 8 and sum(tokens == other for tokens, other in large) <= 1


@pytest.mark.ranks
def test_the_command_shows_who_wrote_what(runs):
    seen = runs[1]
    assert seen["writers"] == [None, "large", "written", "answers"] * 4 and seen["report"]
    for line in seen["metrics"]:
        assert line["guests/large/rows"] == line["guests/written/rows"] == 4 and line["time/guests_s"] > 0
    # The same model wrote the file, with other random numbers: its log-probabilities are those of its tokens.
    first = [seen["metrics"][0][f"guests/{name}/ratio_mean"] for name in ("large", "written")]
    assert first == [pytest.approx(1, abs=0.5)] * 2
    # Each rollout has one optimizer step, in which such a guest's ratio is 1.
    assert [line["guests/answers/ratio_max"] for line in seen["metrics"]] == [pytest.approx(1, abs=1e-5)] * 2
    assert [line["progress/completions"] for line in seen["metrics"]] == [4, 8]
