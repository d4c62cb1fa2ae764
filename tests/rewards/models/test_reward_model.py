"""Reward models: the score of transformers' forward on a text alone, whatever the batch, the padding and the rank."""

import json
import random
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from char_tokenizer import TEMPLATE, ids
from reward_models import ARCHITECTURES, make_reward_model
from seeing import make_seeing_classifier, pictures
from tiny_models import build, tiny_config
from transformers import AutoModelForSequenceClassification, AutoTokenizer, T5Config

from hybrid_grpo.config import DataConfig, PolicyConfig, RewardConfig, ScoringConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, RewardStatus, Scores
from hybrid_grpo.data.picture import read_picture
from hybrid_grpo.distributed.hardware import Hardware
from hybrid_grpo.distributed.workers.calls import Call
from hybrid_grpo.model.sight import load_processor
from hybrid_grpo.rewards.loader import load_rewards
from hybrid_grpo.rewards.models.reward_model import held, reward_model
from hybrid_grpo.rewards.scorer import Rewards
from hybrid_grpo.run.memory.plan import estimate

PROMPTS = [f"{'abcdefgh' * (k % 4)}{k}? " for k in range(12)]
SHARDED = {"zero_stage": 3}
TEXTS = [f"{'xyz, ' * (k % 7)}{chr(97 + k)}{'.' * (k % 2)}" for k in range(12)]


def plain(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """The logits of transformers on one text."""
    model = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    with torch.no_grad():
        return model(input_ids=torch.tensor([token_ids])).logits[0]


def scored(rewards: Rewards, prompts: list[Any], texts: list[str]) -> Scores:
    rows = [Prompt(k, text, [1], {}) for k, text in enumerate(prompts)]
    return rewards.score(rows, [Completion([1] * len(text), [0.0] * len(text), "stop", text) for text in texts])


def refusal(**kwargs: Any) -> str:
    """Before any weight is read."""
    with pytest.raises(UserError) as caught:
        load_rewards([RewardConfig("reward_model", kwargs=kwargs)])
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("pad", [True, False])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_scores_are_those_of_transformers_on_each_text_alone(tmp_path, architecture, pad):
    if architecture == "bert" and not pad:
        pytest.skip("its embedding has a row for padding")
    folder = make_reward_model(tmp_path, architecture, pad=pad)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    texts = [prompt + text for prompt, text in zip(PROMPTS, TEXTS, strict=True)]
    theirs = [float(plain(folder, tokenizer(text)["input_ids"])) for text in texts]
    ours = reward_model(PROMPTS, TEXTS, model=str(folder))
    assert ours == pytest.approx(theirs, abs=1e-5)
    assert max(ours) - min(ours) > 0.5, "scores that do not differ would prove little"
    # Whatever else is in the batch, and however large it is.
    order = random.Random(0).sample(range(12), 12)
    shuffled = reward_model([PROMPTS[k] for k in order], [TEXTS[k] for k in order], model=str(folder), batch_tokens=50)
    assert shuffled == pytest.approx([theirs[k] for k in order], abs=1e-5)
    alone = [score for k in range(12) for score in reward_model([PROMPTS[k]], [TEXTS[k]], model=str(folder))]
    assert alone == pytest.approx(theirs, abs=1e-5)


@pytest.mark.parametrize("name", ["gemma3", "qwen3_5"])
def test_a_model_that_sees_reads_the_pictures_of_prompts(tmp_path, name):
    make_seeing_classifier(name, tmp_path)
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path).eval()
    processor = load_processor(str(tmp_path))
    shown = pictures()
    image = {"type": "image"}
    chat = [
        {"role": "user", "content": [image, {"type": "text", "text": "Or"}, image, {"type": "text", "text": "it?"}]}
    ]
    prompts = ["How?", chat, "Only text", "<image> first", chat, "How?"]
    of_prompts = [shown[:1], shown[1:3], [], shown[3:], [shown[2], shown[1]], shown[1:2]]
    texts = ["yes", "the one at the left", "no", "ab", "the one at the left", "yes"]
    sign = processor.tokenizer.apply_chat_template([{"role": "user", "content": [image]}], tokenize=False)[11:]
    written = [f"{sign}How?", f"{sign}Or{sign}it?", "Only text", f"{sign} first", f"{sign}Or{sign}it?", f"{sign}How?"]
    written[2] = "Only text"
    theirs = []
    for prompt, images, text in zip(written, of_prompts, texts, strict=True):
        whole = f"<bos><user>{prompt}<assistant>{text}<eos>" if images else f"{prompt}{text}"
        given = processor(text=[whole], images=images or None, add_special_tokens=False, return_tensors="pt")
        with torch.no_grad():
            theirs.append(float(model(**given).logits))
    assert len({round(score, 3) for score in theirs}) == len(theirs), "pictures and their order show in the score"
    read = [tuple(read_picture(each, None, "a row") for each in images) for images in of_prompts]
    kwargs = {"model": str(tmp_path)}
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs=kwargs)]))
    rows = [Prompt(k, text, [1], {}, pictures=seen) for k, (text, seen) in enumerate(zip(prompts, read, strict=True))]
    ended = [Completion([1], [0.0], "stop", text) for text in texts]
    assert rewards.score(rows, ended).reward_B.tolist() == pytest.approx(theirs, abs=1e-5)
    twice = {"prompts": prompts * 2, "completions": texts + ["else"] * 6, "prompt_images": read * 2}
    with mock.patch.object(held(kwargs), "scores", return_value=range(12)) as scores:
        assert held(kwargs).reply(Call(twice, [None] * 12)).values == list(range(12))
    [[rows_of_both]] = [call.args for call in scores.call_args_list]
    assert rows_of_both[0].ids != rows_of_both[6].ids and not rows_of_both[8].seen
    assert all(rows_of_both[k].seen["pixel_values"] is rows_of_both[6 + k].seen["pixel_values"] for k in (0, 1, 3, 4))
    assert rows_of_both[1].seen["pixel_values"] is not rows_of_both[4].seen["pixel_values"], "another order"
    for setting, message in (
        ({"template": "text"}, "no place with template text"),
        ({"max_tokens": 9}, "max_tokens 9"),
    ):
        with pytest.raises(ValueError, match=message):
            reward_model(["How?"], ["yes"], [read[0]], model=str(tmp_path), **setting)
    blind_to_them = Rewards(load_rewards([RewardConfig("reward_model", kwargs=kwargs | {"template": "text"})]))
    with pytest.raises(UserError, match=r"rewards: reward_model: prompts have pictures, .*: set template to chat"):
        blind_to_them.check_prompts(rows)
    blind_to_them.check_prompts(rows[2:3])


def test_two_labels_are_their_log_odds_and_the_sigmoid_is_the_probability(tmp_path):
    folder = str(make_reward_model(tmp_path, labels=2))
    logits = plain(tmp_path, AutoTokenizer.from_pretrained(folder)(PROMPTS[5] + TEXTS[5])["input_ids"])
    (score,) = reward_model(PROMPTS[5:6], TEXTS[5:6], model=folder)
    assert score == pytest.approx(float(logits[1] - logits[0]), abs=1e-5)
    (probability,) = reward_model(PROMPTS[5:6], TEXTS[5:6], model=folder, sigmoid=True)
    assert probability == pytest.approx(float(logits.softmax(-1)[1]), abs=1e-5)


def test_a_text_that_ends_in_the_token_of_padding_is_scored_as_transformers_does(tmp_path):
    """Where end and padding are one token, as in many a model, the score is that of the token before."""
    folder = make_reward_model(tmp_path)
    prompts, texts = ["ab", "abcdef"], ["c<pad>", "g"]
    theirs = [float(plain(folder, ids(*"abc", "<pad>"))), float(plain(folder, ids("abcdefg")))]
    assert reward_model(prompts, texts, model=str(folder)) == pytest.approx(theirs, abs=1e-5)


def test_special_tokens_are_those_of_the_tokenizer_once(tmp_path):
    held_model = held({"model": str(make_reward_model(tmp_path, adds=True))})
    once = ids("<bos>", "abc", "<eos>")
    for prompt, text in [("ab", "c"), ("<bos>ab", "c"), ("ab", "c<eos>"), ("<bos>a", "bc<eos>")]:
        assert held_model.tokens(prompt, text) == (once, 0)


def test_chats_are_written_by_the_template_of_the_model(tmp_path):
    folder = str(make_reward_model(tmp_path, template=TEMPLATE, adds_bos=True))
    chat = [{"role": "system", "content": "s"}, {"role": "user", "content": "hi"}]
    written = ids("<bos>", "<system>", "s", "<user>", "hi", "<assistant>", "yes")
    assert held({"model": folder}).tokens(chat, "yes") == (written, 0)
    as_user = ids("<bos>", "<user>", "hi", "<assistant>", "yes")
    assert held({"model": folder, "template": "chat"}).tokens("hi", "yes") == (as_user, 0)
    assert held({"model": folder}).tokens("hi", "yes") == (ids("<bos>", "hiyes"), 0)
    # This tokenizer has no line ends.
    lines = ids("<bos>", "shiyes")
    assert held({"model": folder, "template": "text"}).tokens(chat, "yes") == (lines, 0)
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs={"model": folder})]))
    theirs = float(plain(tmp_path, written))
    assert scored(rewards, [chat], ["yes"]).reward_B.tolist() == pytest.approx([theirs], abs=1e-5)


def test_long_texts_lose_their_beginning_but_for_the_first_special_token(tmp_path):
    folder = make_reward_model(tmp_path, adds=True)
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs={"model": str(folder), "max_tokens": 6})]))
    scores = scored(rewards, ["abcdef", "a"], ["gh", "b"])
    kept = ids("<bos>", "efgh", "<eos>")
    assert held({"model": str(folder), "max_tokens": 6}).tokens("abcdef", "gh") == (kept, 4)
    theirs = [float(plain(folder, kept)), float(plain(folder, ids("<bos>", "ab", "<eos>")))]
    assert scores.reward_B.tolist() == pytest.approx(theirs, abs=1e-5)
    assert scores.extra == {"reward_model/cut_tokens": [4, 0]}
    # Not given, it is what the model has positions for.
    assert len(held({"model": str(folder)}).tokens("a" * 200, "b")[0]) == 128


def test_a_row_without_a_text_fails_alone(tmp_path):
    chat = [{"role": "user", "content": "hi"}]
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs={"model": str(make_reward_model(tmp_path))})]))
    scores = scored(rewards, ["a", chat, ""], ["b", "c", ""])
    status = scores.status["reward_model"].tolist()
    assert status == [RewardStatus.SCORED, RewardStatus.FAILED, RewardStatus.FAILED]
    assert scores.reward_B[0].item() == pytest.approx(float(plain(tmp_path, ids("ab"))), abs=1e-5)


@pytest.mark.process
def test_it_runs_in_a_thread_of_the_rank_or_in_processes_on_the_cpu(tmp_path):
    kwargs = {"model": str(make_reward_model(tmp_path)), "device": "cpu"}
    here = RewardConfig("reward_model", kwargs=kwargs)
    apart = RewardConfig("reward_model", name="apart", kwargs=kwargs, isolation="process", batch_size=4)
    rewards = Rewards(load_rewards([here, apart], ScoringConfig(workers=1)))
    in_thread, in_process = rewards.functions
    assert (in_thread.interface.batch_size, in_process.interface.batch_size) == (32, 4)
    assert in_thread.model is held(kwargs) and in_process.model is None
    rewards.load_models()
    scores = scored(rewards, PROMPTS, TEXTS)
    by_name = scores.by_function
    assert by_name["apart"].tolist() == pytest.approx(by_name["reward_model"].tolist(), abs=1e-5)
    assert by_name["reward_model"].tolist() == pytest.approx(reward_model(PROMPTS, TEXTS, **kwargs), abs=1e-5)
    with pytest.raises(UserError, match=r"rewards\[0\].isolation process: .* set rewards\[0\].kwargs device to cpu"):
        load_rewards([RewardConfig("reward_model", kwargs={"model": kwargs["model"]}, isolation="process")])


@pytest.mark.parametrize(
    "kwargs, on_device, on_host",
    [({}, 4, 0), ({"dtype": "bfloat16"}, 2, 0), ({"device": "cpu"}, 0, 4), (SHARDED, 0, 2)],
)
def test_the_plan_counts_the_weights(tmp_path, kwargs, on_device, on_host):
    """Bytes of a parameter on two ranks."""
    folder = make_reward_model(tmp_path / "rm")
    build(tiny_config("qwen2")).save_pretrained(tmp_path / "policy")
    config = TrainConfig(policy=PolicyConfig(str(tmp_path / "policy")), data=DataConfig("unread"))
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs={"model": str(folder), **kwargs})]))
    gpu = Hardware("gpu", True, 80 << 30, 80 << 30, 1 << 30, 1e14, 1e12)
    made = estimate(config, batch_plan(config, 2), 16, gpu, rewards.models)
    assert made is not None
    parameters = sum(p.numel() for p in AutoModelForSequenceClassification.from_pretrained(folder).parameters())
    device = {part.name: part.bytes for part in made.peak.parts}
    host = {part.name: part.bytes for part in made.host.parts}
    assert (device.get("reward models", 0), host.get("reward models", 0)) == (
        on_device * parameters,
        on_host * parameters,
    )


def test_settings_are_refused_before_weights_are_read(tmp_path):
    folder = make_reward_model(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    good = {"model": str(folder)}
    load_rewards([RewardConfig("reward_model", kwargs=good)])
    assert "missing 1 required keyword-only argument: 'model'" in refusal()
    assert "did you mean template" in refusal(**good, tenplate="chat")
    assert "template: Input should be 'auto', 'chat' or 'text'" in refusal(**good, template="jinja")
    assert "has no chat template: set template to text" in refusal(**good, template="chat")
    assert "dtype: Input should be 'auto', 'float32'" in refusal(**good, dtype="half")
    assert "zero_stage: Input should be 0 or 3" in refusal(**good, zero_stage=2)
    assert "batch_tokens: Input should be greater than or equal to 1" in refusal(**good, batch_tokens=0)
    assert "max_tokens 129: model" in refusal(**good, max_tokens=129) and "128 positions" in refusal(
        **good, max_tokens=129
    )
    assert "device 'gpu' must be auto, cpu, cuda" in refusal(**good, device="gpu")
    assert "leave device out" in refusal(**good, zero_stage=3, device="cpu")
    assert "zero_stage 3 does not support float16" in refusal(**good, zero_stage=3, dtype="float16")
    assert "there is no such folder" in refusal(model=str(tmp_path / "none"))
    assert "model: Input should be a valid string" in refusal(model=[1])


def test_folders_that_hold_no_reward_model_are_refused(tmp_path):
    three = make_reward_model(tmp_path / "three", labels=3)
    assert "has 3 labels" in refusal(model=str(three))
    language_model = tmp_path / "lm"
    build(tiny_config("qwen2")).save_pretrained(language_model)
    assert "is a Qwen2ForCausalLM: take one" in refusal(model=str(language_model))
    T5Config(d_model=8, num_layers=1).save_pretrained(tmp_path / "t5")
    assert "(t5) is an encoder-decoder or has no classifier: take another ...ForSequenceClassification" in refusal(
        model=str(tmp_path / "t5")
    )
    without_tokenizer = make_reward_model(tmp_path / "bare")
    for file in without_tokenizer.glob("token*"):
        file.unlink()
    assert "okenizer" in refusal(model=str(without_tokenizer))
    # What only the weights can tell is told before the policy is loaded.
    config = json.loads((language_model / "config.json").read_text())
    (language_model / "config.json").write_text(json.dumps(config | {"architectures": None, "id2label": {"0": "good"}}))
    AutoTokenizer.from_pretrained(three).save_pretrained(language_model)
    rewards = Rewards(load_rewards([RewardConfig("reward_model", kwargs={"model": str(language_model)})]))
    with pytest.raises(UserError, match=r"rewards: reward_model: model .* lacks 1 of the weights .* score.weight"):
        rewards.load_models()
    sharded = {"model": str(make_reward_model(tmp_path / "good")), **SHARDED}
    with pytest.raises(UserError, match="zero_stage 3 needs the ranks of a training run"):
        Rewards(load_rewards([RewardConfig("reward_model", kwargs=sharded)])).load_models()
