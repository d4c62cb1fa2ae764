"""A tokenizer of single characters, made on the spot."""

import string

from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

SPECIAL = ["<pad>", "<bos>", "<eos>", "<user>", "<system>", "<assistant>"]
IDS = {token: number for number, token in enumerate([*SPECIAL, *string.ascii_letters, *" .,:?0123456789"])}

TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role not in ['user', 'system', 'assistant'] %}{{ raise_exception('unknown role') }}{% endif %}"
    "{% if 'tool_calls' in message %}{{ raise_exception('tool calls') }}{% endif %}"
    "<{{ message.role }}>{{ message.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def char_tokenizer(
    template: str | None = None, bos: bool = True, eos: bool = True, adds_bos: bool = False, adds_eos: bool = False
) -> PreTrainedTokenizerFast:
    """Returns a tokenizer; `adds_bos` and `adds_eos` put bos before every text, as for Llama, and eos after."""
    backend = Tokenizer(models.WordLevel(dict(IDS), unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    if adds_bos or adds_eos:
        single = f"{'<bos> ' * adds_bos}$A{' <eos>' * adds_eos}"
        backend.post_processor = processors.TemplateProcessing(single, special_tokens=[("<bos>", 1), ("<eos>", 2)])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", bos_token="<bos>" if bos else None,
        eos_token="<eos>" if eos else None, additional_special_tokens=SPECIAL[3:],
    )  # fmt: skip
    tokenizer.chat_template = template
    return tokenizer


def ids(*parts: str) -> list[int]:
    """Token ids of special tokens, given whole, and of text, letter by letter."""
    return [IDS[token] for part in parts for token in ([part] if part in SPECIAL else part)]
