"""Tokenizers of single characters with chat templates that know tools, in the manner of three families of models."""

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
_FRAME = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}CALLS<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_EACH = "{% for call in message.tool_calls or [] %}{% set f = call.function %}"
_ALL = "{% if message.tool_calls %}"
_OBJECT = '{"name": "{{ f.name }}", "arguments": {{ f.arguments | tojson }}}'
_LIST = "[" + _EACH + _OBJECT + "{% if not loop.last %}, {% endif %}{% endfor %}]"
_PAIRS = "{% for k, v in f.arguments.items() %}"
_PLAIN = "{{ v if v is string else v | tojson }}"
_PYTHON = "{{ f.name }}(" + _PAIRS + "{{ k }}={{ v | tojson }}{% if not loop.last %}, {% endif %}{% endfor %})"


def _mark(name: str) -> str:
    """A mark of DeepSeek's."""
    return "<\uff5ctool\u2581" + name.replace(" ", "\u2581") + "\uff5c>"


WRITERS = {
    "hermes": _EACH + f"<tool_call>\n{_OBJECT}\n</tool_call>{{% endfor %}}",
    "mistral": _ALL + f"[TOOL_CALLS]{_LIST}{{% endif %}}",
    "mistral of v11": _EACH
    + "[TOOL_CALLS]{{ f.name }}[CALL_ID]{{ call.id }}[ARGS]{{ f.arguments | tojson }}{% endfor %}",
    "mistral of v13": _EACH + "[TOOL_CALLS]{{ f.name }}{{ f.arguments | tojson }}{% endfor %}",
    "qwen3_coder": (
        f"{_EACH}\n<tool_call>\n<function={{{{ f.name }}}}>\n{_PAIRS}<parameter={{{{ k }}}}>\n{_PLAIN}\n</parameter>\n"
        "{% endfor %}</function>\n</tool_call>{% endfor %}"
    ),
    "glm45": (
        f"{_EACH}\n<tool_call>{{{{ f.name }}}}\n{_PAIRS}<arg_key>{{{{ k }}}}</arg_key>\n<arg_value>{_PLAIN}"
        "</arg_value>\n{% endfor %}</tool_call>{% endfor %}"
    ),
    "kimi_k2": (
        _ALL + "<|tool_calls_section_begin|>" + _EACH + "<|tool_call_begin|>{{ call.id }}<|tool_call_argument_begin|>"
        "{{ f.arguments | tojson }}<|tool_call_end|>{% endfor %}<|tool_calls_section_end|>{% endif %}"
    ),
    "deepseek_v3": (
        _ALL
        + _mark("calls begin")
        + _EACH
        + _mark("call begin")
        + "{{ call.type + '<\uff5ctool\u2581sep\uff5c>' + f.name + '\n```json\n' + f.arguments + '\n```' }}"
        + _mark("call end")
        + "{% endfor %}"
        + _mark("calls end")
        + "{% endif %}"
    ),
    "gemma4": (
        _EACH
        + "<|tool_call>call:{{ f.name }}{{ '{' }}"
        + _PAIRS
        + '{{ k }}:{% if v is string %}<|"|>{{ v }}<|"|>{% else %}'
        "{{ v | tojson }}{% endif %}{% if not loop.last %},{% endif %}{% endfor %}}<tool_call|>{% endfor %}"
    ),
    "minimax_m2": (
        f'{_ALL}<minimax:tool_call>\n{_EACH}<invoke name="{{{{ f.name }}}}">\n{_PAIRS}<parameter name="{{{{ k }}}}">'
        f"{_PLAIN}</parameter>"
        "\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>{% endif %}"
    ),
    "granite": _ALL + f"<|tool_call|>{_LIST}{{% endif %}}",
    "phi4_mini": _ALL + f"functools{_LIST}{{% endif %}}",
    "olmo3": _ALL + f"<function_calls>{_EACH}{_PYTHON}\n{{% endfor %}}</function_calls>{{% endif %}}",
    "lfm2": _ALL + f"<|tool_call_start|>[{_EACH}{_PYTHON}{{% endfor %}}]<|tool_call_end|>{{% endif %}}",
    "llama3": _EACH + '{"name": "{{ f.name }}", "parameters": {{ f.arguments | tojson }}}{% endfor %}',
    "pythonic": _ALL + f"[{_EACH}{_PYTHON}{{% endfor %}}]{{% endif %}}",
}
"""How chat templates write calls, by format."""


def writer(calls: str) -> str:
    """A chat template that writes calls so."""
    return _FRAME.replace("CALLS", calls)


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
