"""`chat`, in this process, through a pipe: with a chat template, without one, with adapters and folders of runs."""

import io
import json
import os
import shutil
import signal
import sys
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from char_tokenizer import TEMPLATE, char_tokenizer, ids
from seeing import make_seeing, pictures
from tiny_models import build, tiny_config
from tokenizers import decoders

from hybrid_grpo.__main__ import main
from hybrid_grpo.commands import chat
from hybrid_grpo.generation import rollout

OPTIONS = ["--policy.dtype=float32", "--rollout.max_completion_tokens=6"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Models `plain` and `templated` of 64 positions, with the same weights."""
    folder = tmp_path_factory.mktemp("chat")
    for name, template in (("plain", None), ("templated", TEMPLATE)):
        tokenizer = char_tokenizer(template)
        tokenizer.backend_tokenizer.decoder = decoders.Fuse()
        tokenizer.save_pretrained(folder / name)
        config = tiny_config("qwen2", vocab_size=len(tokenizer), max_position_embeddings=64)
        build(config).save_pretrained(folder / name)
    return folder


class Talk:
    """The command with lines from a pipe; what it asked of the model, and what the model said."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch, self._capsys = monkeypatch, capsys
        self.prompts: list[list[int]] = []
        self.answers: list[str] = []
        self.err = ""

        def complete(*args: Any, **kwargs: Any) -> Any:
            (request,) = args[2]
            self.prompts.append(request.prompt_ids)
            groups, stats = sampled(*args, **kwargs)
            self.answers.append(groups[0][0].text)
            return groups, stats

        sampled = rollout.complete
        monkeypatch.setattr(rollout, "complete", complete)

    def __call__(self, *arguments: str, lines: list[str], status: int = 0) -> str:
        self.prompts.clear()
        self.answers.clear()
        stream = io.TextIOWrapper(io.BytesIO("".join(f"{line}\n" for line in lines).encode()))
        self._monkeypatch.setattr(sys, "stdin", stream)
        assert main(["chat", *arguments[:1], *OPTIONS, *arguments[1:]]) == status
        out, self.err = self._capsys.readouterr()
        return out


@pytest.fixture
def talk(folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Talk:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return Talk(monkeypatch, capsys)


def test_what_was_said_is_the_beginning_of_the_next_prompt(talk: Talk) -> None:
    lines = ["hi", "", "/undo", "ab", "/system", "cd", "/reset", "ef"]
    out = talk("templated", "--chat.system=kind", lines=lines)
    first, second, third, fourth = talk.answers
    system = ("<bos>", "<system>", "kind")
    assert talk.prompts == [
        ids(*system, "<user>", "hi", "<assistant>"),
        ids(*system, "<user>", "ab", "<assistant>"),
        ids("<bos>", "<user>", "ab", "<assistant>", second, "<user>", "cd", "<assistant>"),
        ids("<bos>", "<user>", "ef", "<assistant>"),
    ]
    assert out == f"{first}\n{second}\n{third}\n{fourth}\n"
    assert len(set(talk.answers)) == 4, "each answer has random numbers of its own"
    assert out == talk("templated", "--chat.system=kind", lines=lines), "and the next time the same"
    assert "[cut at rollout.max_completion_tokens 6]" in talk.err and "run.seed 0, temperature 1," in talk.err


@pytest.mark.parametrize("own, options, sampling", [
    ({"do_sample": True, "temperature": 0.6, "top_k": 20}, [], "temperature 0.6, top_p 1, top_k 20"),
    ({"temperature": 0.6, "top_p": 0.9}, ["--rollout.temperature=0"], "temperature 0, top_p 0.9, top_k 0"),
    ({"do_sample": False}, [], "temperature 0, top_p 1, top_k 0"),
])  # fmt: skip
def test_a_model_is_sampled_as_it_asks(talk: Talk, own: Any, options: list[str], sampling: str) -> None:
    shutil.copytree("plain", "own", dirs_exist_ok=True)
    Path("own/generation_config.json").write_text(json.dumps(own))
    assert talk("own", *options, lines=["ab"]) and f"sampling: run.seed 0, {sampling}, " in talk.err


def test_without_a_template_the_model_continues_the_text(talk: Talk, tmp_path: Path) -> None:
    saved = tmp_path / "said.jsonl"
    talk("plain", "--rollout.temperature=0", lines=["ab", "cd", f"/save {saved}", "/quit", "e"])
    first, second = talk.answers
    # The line end between them is not a letter of this tokenizer, which leaves it out.
    assert talk.prompts == [ids("ab"), ids("ab", first, "cd")]
    assert json.loads(saved.read_text()) == {"prompt": f"ab{first}\ncd", "completion": second}


def test_the_oldest_turns_make_room(talk: Talk) -> None:
    talk("templated", lines=["a" * 30, "b" * 20, "c" * 10])
    assert [len(prompt) <= 64 - 6 for prompt in talk.prompts] == [True] * 3
    second = talk.answers[1]
    assert talk.prompts[1] == ids("<bos>", "<user>", "b" * 20, "<assistant>")
    assert talk.prompts[2] == ids("<bos>", "<user>", "b" * 20, "<assistant>", second, "<user>", "c" * 10, "<assistant>")
    assert talk.err.count("the model's context is full: the oldest 1 messages and answers are left out") == 1


@pytest.mark.parametrize("arguments, lines, message", [
    (["plain"], ["a" * 59], "has room for 58 tokens: shorten it, or lower rollout.max_completion_tokens"),
    (["plain"], ["/undo"], "there is nothing to take back"),
    (["plain"], ["/sing"], "/sing is not a command: known are /reset, /system TEXT"),
    (["plain"], ["/system x"], "(chat.system) needs a chat template"),
    (["plain", "--chat.system=x"], [], "(chat.system) needs a chat template"),
    (["plain", "--rollout.max_completion_tokens=64"], [], "policy.model has 64 positions: set it to 32 or lower"),
    (["templated", "--data.chat_template_kwargs={thinking: true}"], [], "reads no such variable"),
    (["nowhere/"], [], "nowhere/: there is no such file or folder"),
])  # fmt: skip
def test_what_cannot_be_is_told_in_one_line(talk: Talk, arguments: list[str], lines: list[str], message: str) -> None:
    assert talk(*arguments, lines=lines, status=2) == ""
    error = talk.err.splitlines()[-1]
    assert error.startswith("hybrid-grpo: error: ") and message in error


def test_ctrl_c_stops_the_answer_and_not_the_program(talk: Talk, monkeypatch: pytest.MonkeyPatch) -> None:
    show, presses = chat._Terminal._show, iter([os.getpid()])

    def shown(self: Any, text: str) -> None:
        show(self, text)
        for process in presses:
            os.kill(process, signal.SIGINT)

    monkeypatch.setattr(chat._Terminal, "_show", shown)
    before = signal.getsignal(signal.SIGINT)
    out = talk("plain", "--rollout.ignore_eos=true", lines=["ab", "cd"])
    assert talk.err.splitlines()[-2:] == ["[stopped]", "[cut at rollout.max_completion_tokens 6]"]
    stopped, _, _ = out.split("\n")
    assert len(stopped) < 6 and talk.prompts[1] == ids("ab", stopped, "cd"), "what was said stays said"
    assert signal.getsignal(signal.SIGINT) is before


def test_an_adapter_is_put_on_its_base_model(talk: Talk, folder: Path) -> None:
    config = peft.LoraConfig(task_type="CAUSAL_LM", r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    model = build(tiny_config("qwen2", vocab_size=len(char_tokenizer()), max_position_embeddings=64))
    model.name_or_path = model.config._name_or_path = "plain"
    adapted = peft.get_peft_model(model, config)
    adapted.save_pretrained(folder / "adapter")
    adapted.merge_and_unload().save_pretrained(folder / "run" / "model")
    char_tokenizer(TEMPLATE).save_pretrained(folder / "run" / "model")
    lines = ["abcd", "efgh"]
    greedy = ["--rollout.temperature=0", "--data.chat_template=never"]
    adapter = talk("adapter", *greedy, lines=lines)
    assert "model: adapter\n" in talk.err
    assert adapter == talk("run/model", *greedy, lines=lines) != talk("plain", *greedy, lines=lines)

    # A run: its own settings are the defaults.
    (folder / "run" / "config.yaml").write_text("data: {system_prompt: kind}\nsft: {batch_size: 8}\n")
    talk("run", lines=["hi"])
    assert talk.prompts == [ids("<bos>", "<system>", "kind", "<user>", "hi", "<assistant>")]
    talk("run", "--chat.system=", lines=["hi"])
    assert talk.prompts == [ids("<bos>", "<system>", "<user>", "hi", "<assistant>")]


def test_pictures_are_shown_with_the_next_message(talk: Talk, tmp_path: Path) -> None:
    make_seeing("qwen3_vl", tmp_path / "seeing")
    pictures()[0].save(tmp_path / "a.png")
    lines = [f"/image {tmp_path}/a.png", "What?", "And now?", f"/save {tmp_path}/said.jsonl", "/reset", "Blind."]
    talk(str(tmp_path / "seeing"), lines=lines)
    seen = [sum(token < 0 for token in prompt) for prompt in talk.prompts]
    assert seen == [4, 4, 0], "the picture stays in the conversation"
    assert talk.prompts[1][: len(talk.prompts[0])] == talk.prompts[0]
    row = json.loads((tmp_path / "said.jsonl").read_text())
    assert row["prompt"][0]["content"][0] == {"type": "image", "image": f"{tmp_path}/a.png"}
    talk(str(tmp_path / "seeing"), lines=["/image nowhere.png"], status=2)
    assert "/image: the picture" in talk.err and "is not a file" in talk.err
    talk("templated", lines=["/image a.png"], status=2)
    assert "/image: policy.model sees no pictures" in talk.err
