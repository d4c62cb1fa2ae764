"""Completions of several turns: those who answer the model's turns, and what it reads of them.

    trajectory.py     a completion under way, and what those who answer have in common (`Partner`)
    tools/            a partner: functions, and their calls in worker processes
    environments/     a partner: an object for each completion, in a worker process of its own
    users/            a partner: a function or a frozen model that plays the user
    openings.py       what environments say at the beginning, at the end of prompts
    rewards.py        what environments give, as rewards
    calls.py          what a turn says: text, calls, a fault
    formats/          the formats that calls are written in
    reading.py        which format it is, and from the text of a turn to what it says
    template.py       from answers to the tokens that stand between two turns
    partners.py       all of it together, as the decoder asks for it (generation's `Turns`)

What was sampled is never decoded and read as tokens again: between two turns only the tokens are added that the chat
template itself writes there.
"""
