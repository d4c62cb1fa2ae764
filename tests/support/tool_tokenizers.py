"""Tokenizers of single characters with chat templates that know tools, in the manner of three families of models."""

from __future__ import annotations

import string

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

QWEN = (
    "{%- if tools %}<|im_start|>system\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}"
    "<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{%- for message in messages %}"
    "{%- if message.role == 'tool' %}"
    "{%- if loop.first or messages[loop.index0 - 1].role != 'tool' %}<|im_start|>user{% endif %}"
    "\n<tool_response>\n{{ message.content }}\n</tool_response>"
    "{%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{%- else %}<|im_start|>{{ message.role }}\n{{ message.content }}"
    "{%- for call in message.tool_calls or [] %}"
    "{%- if not (loop.first and not message.content) %}{{ '\n' }}{% endif %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA = (
    "<|begin|>{% if tools %}<|head|>system<|tail|>\n\n{% for tool in tools %}{{ tool | tojson }}\n\n{% endfor %}"
    'Respond as {"name": ..., "parameters": ...}<|eot_id|>{% endif %}'
    "{%- for message in messages %}{% if message.role == 'tool' %}<|head|>ipython<|tail|>\n\n"
    "{{ message.content | tojson }}<|eot_id|>"
    "{%- elif message.tool_calls %}{% if message.tool_calls | length != 1 %}"
    "{{ raise_exception('one call at a time') }}{% endif %}<|head|>assistant<|tail|>\n\n"
    "{% set call = message.tool_calls[0].function %}"
    '{"name": "{{ call.name }}", "parameters": {{ call.arguments | tojson }}}<|eot_id|>'
    "{%- else %}<|head|>{{ message.role }}<|tail|>\n\n{{ message.content | trim }}<|eot_id|>{% endif %}{% endfor %}"
    "{%- if add_generation_prompt %}<|head|>assistant<|tail|>\n\n{% endif %}"
)
MISTRAL = (
    "<s>{% for message in messages %}{% if message.role == 'user' %}"
    "{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ message.content }}[/INST]"
    "{%- elif message.role == 'tool' %}[TOOL_RESULTS]"
    '{"content": {{ message.content | tojson }}, "call_id": "{{ message.tool_call_id }}"}[/TOOL_RESULTS]'
    "{%- elif message.tool_calls %}[TOOL_CALLS]["
    "{% for call in message.tool_calls %}{% if call.id | length != 9 %}{{ raise_exception('ids have 9 letters') }}"
    '{% endif %}{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}, '
    '"id": "{{ call.id }}"}{% if not loop.last %}, {% endif %}{% endfor %}]</s>'
    "{%- else %}{{ message.content }}</s>{% endif %}{% endfor %}"
)
THINKING = (
    "{% set ns = namespace(asked=0) %}{% for message in messages %}{% if message.role == 'user' %}"
    "{% set ns.asked = loop.index0 %}{% endif %}{% endfor %}"
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }}<tool_call></tool_call><|im_end|>\n{% endif %}"
    "{% for message in messages %}{% if message.role == 'tool' %}"
    "<|im_start|>user\n<tool_response>\n{{ message.content }}\n</tool_response><|im_end|>\n"
    "{% else %}<|im_start|>{{ message.role }}\n{% set parts = message.content.split('</think>') %}"
    "{% if parts | length > 1 and KEEPS %}<think>\n{{ parts[0].split('<think>')[-1].strip() }}\n</think>\n\n{% endif %}"
    "{{ parts[-1].lstrip('\n') }}{% for call in message.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ call.function.name }}", "arguments": {{ call.function.arguments | tojson }}}'
    "\n</tool_call>{% endfor %}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n"
    "{% if enable_thinking is defined and not enable_thinking %}<think>\n\n</think>\n\n{% endif %}{% endif %}"
)
REASONING = (
    THINKING.replace("message.content.split('</think>')", "[message.content]")
    .replace("parts | length > 1 and KEEPS", "message.reasoning_content")
    .replace("parts[0].split('<think>')[-1].strip()", "message.reasoning_content")
)
THINKERS = {
    "since the user spoke": THINKING.replace("KEEPS", "loop.index0 > ns.asked"),
    "never": THINKING.replace("KEEPS", "false"),
    "always": THINKING.replace("KEEPS", "true"),
    "in a place of its own": REASONING.replace("<|im_start|>assistant\n{% if", "<|im_start|>assistant\n<think>\n{% if"),
}
"""Templates in the manner of Qwen3, by when they keep the thinking of earlier turns."""
FAMILIES = {"hermes": (QWEN, "<|im_end|>"), "llama3": (LLAMA, "<|eot_id|>"), "mistral": (MISTRAL, "</s>")}
"""The template of each format of calls, and the token that ends a turn."""

SPECIAL = [
    *("<pad>", "<|im_start|>", "<|im_end|>", "<|begin|>", "<|head|>", "<|tail|>", "<|eot_id|>", "<s>", "</s>"),
    *("[INST]", "[/INST]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[AVAILABLE_TOOLS]"),
    "[/AVAILABLE_TOOLS]",
]
CHARACTERS = string.printable[:96] + "\u00e9"


def tool_tokenizer(family: str) -> PreTrainedTokenizerFast:
    """The tokenizer of a family, by the name of its format."""
    template, end = FAMILIES[family]
    vocabulary = {token: number for number, token in enumerate([*SPECIAL, *sorted(set(CHARACTERS) | {"\n"})])}
    backend = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<pad>", eos_token=end, additional_special_tokens=SPECIAL[1:]
    )
    tokenizer.chat_template = template
    return tokenizer
