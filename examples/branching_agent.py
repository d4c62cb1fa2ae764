"""An agent that branches: it answers, goes back to its least likely token, and goes on from there several times. Every
branch is scored, and what they begin with gets the mean of their advantages (TreePO, arXiv:2508.17445, has the idea).

python -m hybrid_grpo train --config training_scripts/quickstart.yaml --rewards '[]' \
    --policy.model ~/.cache/hybrid_grpo/SmolLM2-135M-Instruct.Q4_1.gguf --rollout.num_generations 4 \
    --rollout.agent examples/branching_agent.py:sums --rollout.max_turns 5 --rollout.max_turn_tokens 16 \
    --rollout.max_completion_tokens 80

The file of the model is the one that training_scripts/quickstart.sh has fetched.
"""

import asyncio
import re

BRANCHES = 4


async def sums(task, client):
    more = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = await client.chat.completions.create(model="policy", messages=task["prompt"], **more)
    [choice] = whole.choices
    tokens = choice.logprobs.content
    # The rest of this answer has no reward: it was chosen for an unlikely token, so it is no fair sample.
    fork = min(range(len(tokens)), key=lambda place: tokens[place].logprob)
    begin = "".join(token.token for token in tokens[:fork])
    body = {"model": "policy", "token_ids": [*whole.prompt_token_ids, *choice.token_ids[:fork]]}

    async def branch():
        reply = await client.post("/../inference/v1/generate", body=body, cast_to=object)
        return reply["request_id"], begin + reply["choices"][0]["text"]

    answers = await asyncio.gather(*(branch() for _ in range(BRANCHES)))
    return {reply: float(re.findall(r"-?\d+", text)[-1:] == [task["answer"]]) for reply, text in answers}
