"""A teacher beside the policy: what it tells, the same steps on one rank and on two, and the command."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from char_tokenizer import char_tokenizer
from launching import make_task, ranks
from safetensors.torch import load_file, save_file
from tiny_models import build, tiny_config

from hybrid_grpo import engine as engines
from hybrid_grpo.config import DataConfig, PolicyConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.data import MixtureConfig
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout
from hybrid_grpo.data.packing import pack, pad
from hybrid_grpo.features.teacher import models
from hybrid_grpo.features.teacher.models import TeacherModel
from hybrid_grpo.features.teacher.settings import TeacherConfig
from hybrid_grpo.features.teacher.teacher import Teacher
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.loading import load_tokenizer
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.model.support import SamplingMask
from hybrid_grpo.run.feature import Scored

Seen = dict[str, Any]
TEMPERATURE = 0.8
BLIND = {"sampler": SimpleNamespace(album=None, sees=False)}
"""Of inputs without pictures."""

PROGRAMS = str(Path(__file__).with_name("programs.py"))


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Seen], Seen]:
    """What two ranks have seen, and one alone. One teacher is the model with other weights."""
    folder = make_task(tmp_path_factory.mktemp("task"))
    (folder / "other").mkdir()
    for file in (folder / "model").iterdir():
        (folder / "other" / file.name).write_bytes(file.read_bytes())
    weights, generator = load_file(folder / "model/model.safetensors"), torch.Generator().manual_seed(0)
    moved = {name: w + 0.1 * torch.randn(w.shape, generator=generator) for name, w in weights.items()}
    save_file(moved, folder / "other/model.safetensors", metadata={"format": "pt"})
    rows = map(json.loads, (folder / "train.jsonl").read_text().splitlines())
    answers = [{"prompt": row["prompt"], "completion": row["answer"]} for row in rows]
    (folder / "answers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in answers))
    two = ranks(2, "two", folder, programs=PROGRAMS)
    (one,) = ranks(1, "one", folder, programs=PROGRAMS)
    return two, one


@pytest.mark.ranks
@pytest.mark.parametrize("into", ["loss", "advantage", "sources"])
def test_a_step_depends_neither_on_the_ranks_nor_on_the_stage(runs: tuple[list[Seen], Seen], into: str) -> None:
    two, one = runs
    for step in range(2):
        alone = one[into][step]
        assert alone["metrics"]["teacher/kl"] > 0.01 and alone["metrics"]["policy/grad_norm"] > 0
        assert ("teacher/loss" in alone["metrics"]) == (into == "loss")
        assert alone["metrics"].get("guests/answers/rows", 0) == (12 if into == "loss" else 0)
        for seen in two:
            assert seen[into][step]["metrics"] == pytest.approx(alone["metrics"], rel=1e-5, abs=1e-6)
        # Every one of two minibatches is shared out over the ranks.
        parts, share = [seen[into][step]["tokens"] for seen in two], len(alone["tokens"]) // 4
        assert [row for k in (0, 1) for part in parts for row in part[k * share :][:share]] == alone["tokens"]


@pytest.mark.ranks
def test_the_command_draws_adapters_back_to_the_model_under_them(runs: tuple[list[Seen], Seen]) -> None:
    """Adapters begin as nothing, so the teacher agrees with the policy at first, and has nothing to teach."""
    first, second = runs[1]["run"]
    assert first["teacher/kl"] == pytest.approx(0.0, abs=1e-5) and first["teacher/loss"] == pytest.approx(0.0, abs=1e-5)
    assert first["time/teacher_s"] > 0 and second["teacher/logp"] < 0


def loaded(config: TrainConfig, policy: Any, inputs: Any, monkeypatch: pytest.MonkeyPatch) -> Teacher:
    """The teacher of a run whose inputs were checked."""
    monkeypatch.setattr(TeacherModel, "check", lambda _: None)
    plan: Any = None
    teacher = Teacher(config, plan, inputs)
    teacher.load(policy)
    return teacher


@pytest.mark.parametrize("packed, filtered", [(True, False), (False, False), (True, True), (False, True)])
@pytest.mark.parametrize("top_k", [0, 3])
def test_it_tells_what_it_expects_after_its_own_prompt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed: bool, filtered: bool, top_k: int
) -> None:
    """Against transformers' own forward of each row, of a teacher with more to read than the policy. With `filtered`,
    its probability of a token is among those that the policy's filters left."""
    tokenizer = char_tokenizer()
    model = build(tiny_config("qwen2", vocab_size=len(tokenizer)), ATTENTION if packed else "eager")
    plain = build(tiny_config("qwen2", vocab_size=len(tokenizer)), "eager")
    plain.load_state_dict(model.state_dict())
    cpu = torch.device("cpu")

    def micro_batches(rows: Any, gradients: bool) -> Any:
        return pack(rows, 20, cpu, share="on") if packed else pad(rows, 20, cpu)

    texts = ["ab", "hello"]
    prompts = [Prompt(i, "", [5], {"solved": text}) for i, text in enumerate(texts)]
    rows = [[4], [5, 6, 7], [5, 8], [10, 11, 12, 13]]
    left = [np.array([1, 2, 3, token, 20]) for token in range(4, 14)]
    masks = [(SamplingMask.of([left[token - 4] for token in ids]),) if filtered else () for ids in rows]
    completions = [Completion(ids, [-1.0] * len(ids), "stop", sidecars=s) for ids, s in zip(rows, masks, strict=True)]
    rollout = Rollout(prompts, completions, 2)
    plain.config.save_pretrained(tmp_path)
    config = TrainConfig(
        data=DataConfig(),
        rollout=RolloutConfig(temperature=TEMPERATURE),
        policy=PolicyConfig(model=str(tmp_path)),
        teacher=TeacherConfig(prompt_column="solved", into="loss", top_k=top_k, coef=0.5),
    )
    policy: Any = SimpleNamespace(engine=LogprobModel(model), micro_batches=micro_batches)
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, partners=None, **BLIND)
    scores: Any = None
    scored = Scored(rollout, scores, rollout.logp_BT)
    teacher = loaded(config, policy, inputs, monkeypatch)
    found = teacher.advantages(scored)
    assert found.value_BT is None and len(teacher._next_tokens) == 4
    total = 0.0
    for row, completion in enumerate(rows):
        prompt = tokenizer(texts[row // 2])["input_ids"]
        logits_SV = plain(torch.tensor([[*prompt, *completion]])).logits[0]
        expected_TV = (logits_SV[len(prompt) - 1 : -1] / TEMPERATURE).log_softmax(1)
        told = teacher._next_tokens[row]
        if told.token_NK is None:
            assert (told.logp_NK - expected_TV).abs().max() < 1e-5
        else:
            assert (told.logp_NK[:, :-1] - expected_TV.gather(1, told.token_NK.long())).abs().max() < 1e-5
            assert torch.equal(told.token_NK.long(), expected_TV.topk(top_k, 1).indices)
        among = expected_TV.gather(1, torch.tensor([[1, 2, 3, token, 20] for token in completion]))
        total += expected_TV.gather(1, torch.tensor(completion)[:, None]).sum().item()
        total -= among.logsumexp(1).sum().item() if filtered else 0.0
    assert float(found.numbers["teacher/logp"][0]) == pytest.approx(total / 10, abs=1e-5)
    assert float(found.numbers["teacher/kl"][0]) == pytest.approx(-1.0 - total / 10, abs=1e-5)


def offloaded(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a model in the place of an engine of DeepSpeed, and return what is done with it."""
    done: list[str] = []

    class OffloadedModel(LogprobModel):
        def __init__(self, read: Any, dtype: str, fetching: Any) -> None:
            super().__init__(read().model)
            done.append(fetching.get("offload_param", {"device": "cpu"})["device"])

        def forward(self, *given: Any) -> Any:
            done.append(f"read with {self.model.config.vocab_size}")
            return super().forward(*given)

        def release(self) -> None:
            done.append(f"release {self.model.config.vocab_size}")

    monkeypatch.setattr(engines, "OffloadedModel", OffloadedModel)
    return done


@pytest.mark.parametrize("own, of_teacher", [(33, 30), (30, 33)])
@pytest.mark.parametrize("offload", [True, False])
def test_a_teacher_of_another_size_speaks_of_the_tokens_that_both_know(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: int, of_teacher: int, offload: bool
) -> None:
    """Models of a family have rows for different numbers of tokens. Its weights are where the setting says."""
    tokenizer = char_tokenizer()
    for name, vocabulary in (("policy", own), ("teacher", of_teacher)):
        tokenizer.save_pretrained(tmp_path / name)
        build(tiny_config("qwen2", vocab_size=vocabulary)).save_pretrained(tmp_path / name)
    done = offloaded(monkeypatch)
    config = TrainConfig(
        policy=PolicyConfig(model=str(tmp_path / "policy"), dtype="float32", attn_implementation="eager"),
        teacher=TeacherConfig(model=str(tmp_path / "teacher"), into="loss", offload=offload),
    )
    policy: Any = SimpleNamespace(engine=None, micro_batches=lambda rows, gradients: pad(rows, 20, torch.device("cpu")))
    inputs: Any = SimpleNamespace(tokenizer=tokenizer, partners=None, **BLIND)
    rollout = Rollout([Prompt(0, "", [5, 6], {})], [Completion([7, 8, 9], [-1.0] * 3, "stop")], 1)
    *_, next_tokens = loaded(config, policy, inputs, monkeypatch).read(rollout, rollout.logp_BT)
    assert done[0] == ("cpu" if offload else "none")
    (told,) = next_tokens.values()
    plain = build(tiny_config("qwen2", vocab_size=of_teacher))
    expected_TV = plain(torch.tensor([[5, 6, 7, 8, 9]])).logits[0, 1:-1, :30].log_softmax(1)
    assert told.vocabulary == 30 and (told.logp_NK - expected_TV).abs().max() < 1e-5


@pytest.mark.parametrize("column", [None, "hint"])
def test_the_longest_that_a_teacher_reads_is_as_long_as_it_can(monkeypatch: Any, column: str | None) -> None:
    """A prompt of 30 tokens, or a text of 40 that the teacher reads in its place, and a completion of 50."""
    config = TrainConfig(rollout=RolloutConfig(max_completion_tokens=50), teacher=TeacherConfig(prompt_column=column))
    prompts = [Prompt(0, "p", [1] * 20, {}), Prompt(1, "q", [1] * 30, {})]
    inputs: Any = SimpleNamespace(
        prompts=prompts, tokenizer=char_tokenizer(), longest_prompt=30, partners=None, **BLIND
    )
    longer = 10 if column else 0
    monkeypatch.setattr(TeacherModel, "reads", lambda _, prompt: [1] * (len(prompt.token_ids) + longer))
    monkeypatch.setattr(models, "check_prompt_ids", lambda *_: None)
    longest = 50 + (40 if column else 30)
    for positions in (longest, longest - 1):
        text = SimpleNamespace(vocab_size=9, max_position_embeddings=positions)
        model = SimpleNamespace(get_text_config=lambda text=text, **_: text)
        monkeypatch.setattr(models, "load_config", lambda *_, model=model: model)
        if positions == longest:
            TeacherModel(None, config, inputs).check()
            continue
        with pytest.raises(UserError, match=f"is {longest} tokens: limit .*_tokens to {positions}$"):
            TeacherModel(None, config, inputs).check()


def test_teachers_read_their_own_sources_one_after_the_other(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against transformers' forward of the tokens. Nobody teaches what a guest wrote only for comparison."""
    models_of: dict[str, Any] = {}
    for name, size in (("first", 80), ("second", 90)):
        char_tokenizer().save_pretrained(tmp_path / name)
        models_of[name] = build(tiny_config("qwen2", vocab_size=size), seed=size)
        models_of[name].save_pretrained(tmp_path / name)
    own = load_tokenizer(str(tmp_path / "first"))
    done = offloaded(monkeypatch)
    sources = [MixtureConfig("a.jsonl", name="first"), MixtureConfig("b.jsonl", name="second")]
    by_source = {name: str(tmp_path / name) for name in models_of}
    config = TrainConfig(
        data=DataConfig(mixture=sources),
        rollout=RolloutConfig(temperature=TEMPERATURE, max_completion_tokens=8),
        policy=PolicyConfig(model=by_source["first"], dtype="float32", attn_implementation="eager"),
        teacher=TeacherConfig(by_source=by_source, coef=0.5),
    )
    prompts = [Prompt(0, "", [10, 11], {}, source="first"), Prompt(1, "", [5, 6, 7], {}, source="second")]
    rows = [own(text)["input_ids"] for text in ("ab", "d", "abcdx", "ab")]
    completions = [Completion(ids, [-1.0 - t for t in range(len(ids))], "stop") for ids in rows]
    completions[3] = Completion(rows[3], [], "stop", writer="file", learned=False)
    rollout = Rollout(prompts, completions, 2)
    inputs: Any = SimpleNamespace(tokenizer=own, partners=None, **BLIND, prompts=prompts, longest_prompt=3)
    plan: Any = None
    teacher = Teacher(config, plan, inputs)
    policy = SimpleNamespace(engine=None, micro_batches=lambda rows, gradients: pad(rows, 50, torch.device("cpu")))
    teacher.load(policy)  # type: ignore[arg-type]
    found = teacher.advantages(Scored(rollout, None, rollout.logp_BT))  # type: ignore[arg-type]
    assert done[2:] == [f"{what} {size}" for size in (80, 90) for what in ("read with", "release")]

    def told(name: str, prompt: list[int], ids: list[int]) -> torch.Tensor:
        logits_SV = models_of[name](torch.tensor([prompt + ids])).logits[0]
        logits_TV = logits_SV[len(prompt) - 1 : -1] / TEMPERATURE
        return logits_TV.log_softmax(1).gather(1, torch.tensor(ids)[:, None])[:, 0]

    expected_BT, logp_BT, total = torch.zeros(4, 5), rollout.logp_BT, 0.0
    for row in (0, 1, 2):
        told_T = told(*(("first", [10, 11]) if row < 2 else ("second", [5, 6, 7])), rows[row])
        expected_BT[row, : len(told_T)] = -0.5 * (logp_BT[row, : len(told_T)] - told_T)
        total += told_T.sum().item()
    mask_BT = rollout.mask_BT & torch.tensor([[True], [True], [True], [False]])
    bonus_BT, numbers = found.value_BT, found.numbers
    assert bonus_BT is not None and (bonus_BT - expected_BT)[mask_BT].abs().max() < 1e-5
    assert float(numbers["teacher/logp"][0]) == pytest.approx(total / 8, abs=1e-5)
    # A rank may have no row for a teacher.
    for group in (0, 1):
        part = rollout.groups([group])
        own_BT = teacher.advantages(Scored(part, None, part.logp_BT)).value_BT  # type: ignore[arg-type]
        rows_BT, expected = (
            part.mask_BT & mask_BT[2 * group :][:2, : part.mask_BT.shape[1]],
            expected_BT[2 * group :][:2],
        )
        assert own_BT is not None and (own_BT - expected[:, : own_BT.shape[1]])[rows_BT].abs().max() < 1e-5
