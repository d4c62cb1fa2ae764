"""Multi-turn completions: the partners that answer the model's turns, and the tokens of their answers.

    trajectory.py     a completion under way, and the interface of partners (`Partner`)
    tools/            a partner: functions, called in worker processes
    environments/     a partner: one environment instance per completion, in worker processes; and its rewards
    openings.py       appends initial observations of environments to prompts
    calls.py          a parsed turn: text, calls, a fault; and its parts, as formats find them
    formats/          the formats in which calls are written
    reading.py        finds the format of calls, and parses the text of a turn
    template.py       from answers to the tokens between two turns
    partners.py       puts all of this together for the decoder (generation's `Turns`)

Sampled tokens are never tokenized again: between two turns, only what the chat template writes there is added.
"""
