"""Formats in which models write tool calls, by their names in `rollout.tool_format`.

    json_calls.py   calls that are JSON, or whose arguments are
    xml_calls.py    arguments in tags, typed by the tool's schema
    literals.py     other calls: as in Python, or with Gemma's values

Readers follow the chat templates of their models, and the tests of vLLM's parsers (its tests/tool_parsers).
"""

from hybrid_grpo.turns.calls import Format
from hybrid_grpo.turns.formats.json_calls import deepseek_v3, granite, hermes, kimi_k2, llama3, mistral, phi4_mini
from hybrid_grpo.turns.formats.literals import gemma4, lfm2, olmo3, pythonic
from hybrid_grpo.turns.formats.xml_calls import glm45, minimax_m2, qwen3_coder

# The first format that can read a call is used, so less specific formats are listed later.
FORMATS: dict[str, Format] = {
    "hermes": hermes, "mistral": mistral, "qwen3_coder": qwen3_coder, "glm45": glm45, "kimi_k2": kimi_k2,
    "deepseek_v3": deepseek_v3, "gemma4": gemma4, "minimax_m2": minimax_m2, "granite": granite, "phi4_mini": phi4_mini,
    "olmo3": olmo3, "lfm2": lfm2, "llama3": llama3, "pythonic": pythonic,
}  # fmt: skip
