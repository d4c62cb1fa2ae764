import re


def format_reward(completions, **kwargs):
    return [1.0 if re.match("<think>.*</think>", completion[0]["content"]) else 0.0 for completion in completions]
