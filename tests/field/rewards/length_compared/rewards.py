def len_reward(completions, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    lengths = [len(content) for content in contents]
    shortest = min(lengths)
    longest = max(lengths)
    if longest == shortest:
        return [0.0] * len(completions)
    return [0.5 - (length - shortest) / (longest - shortest) for length in lengths]
