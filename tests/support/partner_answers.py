"""What partners answer to turns that a test has written."""

import time


def tokens(tokenizer, text):
    return tokenizer(text, add_special_tokens=False)["input_ids"]


def answers(partners, count=1):
    """This number of answers, by key."""
    found, until = {}, time.monotonic() + 120
    while len(found) < count and time.monotonic() < until:
        found |= dict(partners.answers(0.2))
    assert len(found) == count
    return found


def answer(partners, key=1):
    """The one answer that is to come."""
    [(of, said)] = answers(partners).items()
    assert of == key
    return said
