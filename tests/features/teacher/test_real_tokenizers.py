"""benchmarks/real_tokenizers.py, which compares the tokens of policies and teachers, too."""

import json
import sys

import pytest
from byte_tokenizers import byte_level
from paths import ROOT
from tool_tokenizers import tool_tokenizer

sys.path.append(str(ROOT / "benchmarks"))

import real_tokenizers


def test_tokenizers_are_checked_and_one_that_is_read_wrong_is_found(tmp_path, monkeypatch, capsys):
    tool_tokenizer("hermes").save_pretrained(tmp_path / "a")
    for name, texts in (("b", ["ab cd"]), ("c", ["bc da", "é日"])):
        byte_level(texts).save_pretrained(tmp_path / name)
    file = tmp_path / "results.json"
    monkeypatch.setattr(sys, "argv", ["x", *(str(tmp_path / name) for name in "abc"), "--json", str(file)])
    with pytest.raises(SystemExit) as ended:
        real_tokenizers.main()
    assert ended.value.code == 0
    assert json.loads(file.read_text()) == {
        "tokenizers": {"a": {"prompts": "26 of 26", "answers": "12 of 12", "tools": "20 of 20", "several": "12 of 12"}},
        "pairs": {"b taught by c": 1.0, "c taught by b": 1.0},
    }
    right = real_tokenizers.Between.ids
    monkeypatch.setattr(real_tokenizers.Between, "ids", lambda *given: right(*given)[1:])
    with pytest.raises(SystemExit) as ended:
        real_tokenizers.main()
    assert ended.value.code == 1 and "a: tools 0 of 20: " in capsys.readouterr().out
