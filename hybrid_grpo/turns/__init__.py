"""Completions of several turns: tools that the model calls, and what it reads of them.

    tools.py          the functions, and their calls in worker processes
    calls.py          from the text of a turn to the calls in it
    template.py       from results to the tokens that stand between two turns
    conversations.py  all of it together, as the decoder asks for it (generation's `Turns`)

What was sampled is never decoded and read as tokens again: between two turns only the tokens are added that the chat
template itself writes there.
"""

from hybrid_grpo.turns.conversations import Conversations, conversations_of, with_tools
from hybrid_grpo.turns.tools import Tools

__all__ = ["Conversations", "Tools", "conversations_of", "with_tools"]
