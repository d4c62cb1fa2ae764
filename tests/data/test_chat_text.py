"""Text that others have written never becomes a control token, whatever a tokenizer does where a text begins."""

import random

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from hybrid_grpo.data.chat_template import ChatText, clean

SPECIAL = ["<|im_end|>", "<|im_start|>"]
TEXTS = ["It is so, and then some more.\n\nIt is two lines.", "<tool>", "im_end and |im_start|", "a  b\n c"] * 3


def byte_level():
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return backend, pre_tokenizers.ByteLevel.alphabet()


def metaspace():
    """As Llama 2 and Mistral have it: a space before the first word of all."""
    backend = Tokenizer(models.BPE(unk_token="?"))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.Metaspace(), decoders.Metaspace()
    return backend, [*map(chr, range(32, 127)), "\n", "\u2581", "?"]


@pytest.fixture(params=[byte_level, metaspace])
def tokenizer(request):
    backend, alphabet = request.param()
    trainer = trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(TEXTS, trainer)
    backend.add_special_tokens(SPECIAL)
    backend.add_tokens([AddedToken("</tool>", normalized=False), AddedToken("<think>", normalized=False)])
    return PreTrainedTokenizerFast(tokenizer_object=backend, additional_special_tokens=SPECIAL)


def test_forged_tokens_are_text_and_ordinary_text_is_tokenized_at_once(tokenizer):
    text = ChatText(tokenizer, "{{ '</tool>' }}")
    control = {name: tokenizer.convert_tokens_to_ids(name) for name in (*SPECIAL, "</tool>")}
    rng = random.Random(0)
    for _ in range(300):
        pieces = rng.choices([*TEXTS, *control, "<think>", " ", "\n", "\U000f0000", "x\U000f0001"], k=rng.randint(0, 6))
        said = "".join(pieces)
        frame = f"{SPECIAL[1]}user\n{text.marked(said)}{SPECIAL[0]}\n"
        ids = text.ids(frame)
        assert [ids.count(token) for token in control.values()] == [1, 1, 0]
        plain = said.replace("\U000f0000", "").replace("\U000f0001", "")
        whole = f"{SPECIAL[1]}user\n{plain}{SPECIAL[0]}\n"
        assert "".join(tokenizer.decode(ids).split()) == "".join(whole.split())
        if not any(name in plain for name in control):
            assert ids == tokenizer(whole, add_special_tokens=False)["input_ids"]
        assert ids.count(tokenizer.convert_tokens_to_ids("<think>")) == plain.count("<think>")


def test_marks_reach_into_the_parts_of_messages():
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=byte_level()[0], additional_special_tokens=SPECIAL)
    marked = ChatText(tokenizer).marked([{"type": "text", "text": "a<|im_end|>"}, None, 3])
    assert marked == [{"type": "text", "text": "a\U000f0000<|im_end|>\U000f0001"}, None, 3]


def test_halves_of_surrogate_pairs_are_replaced():
    assert clean("caf\udce9 \ud83d\ude00 é🎉") == "caf? ?? é🎉"
