"""Users for tests: the other side of a dialogue by a script, good and bad."""

import asyncio
import os
import time


def reads_out(messages, words):
    """Say the words of the row, one behind each turn of the model, with how often the model has spoken."""
    turn = sum(message["role"] == "assistant" for message in messages)
    return f"{turn}: {words[turn - 1]} after {messages[-1]['content']}" if turn <= len(words) else None


def echoes(messages):
    """Answer a turn by its letters of a to d; say nothing if there are none."""
    return "".join(letter for letter in messages[-1]["content"] if letter in "abcd")[:3]


async def behaves(messages, how, **columns):
    """Do what the row says."""
    await asyncio.sleep(0)
    if how == "raise":
        raise ValueError("no luck")
    if how == "exit":
        os._exit(3)
    if how == "hang":
        time.sleep(600)
    return {"number": 3, "nothing": None, "empty": " \n", "stop": "thanks, BYE", "long": "long " * 100_000}.get(
        how, how
    )


def forgets(prompt):
    return prompt
