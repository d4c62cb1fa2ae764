"""An agent that branches: it answers, goes back to its least likely token, and goes on from there several times. Every
branch is scored, and what they begin with gets the mean of their advantages (TreePO, arXiv:2508.17445, has the idea).

python training_scripts/lookup_task.py runs/lookup-task
python -m hybrid_grpo train --config examples/tiny.yaml --data.task examples/own_task.py:first_letter --rewards '[]' \
    --policy.model runs/lookup-task/model --rollout.agent examples/branching_agent.py:branches --run.name branches \
    --rollout.max_turns 5 --rollout.max_turn_tokens 8 --rollout.max_completion_tokens 40 --rollout.max_total_tokens 64 \
    --rollout.num_generations 4 --policy.lr 1e-3 --run.steps 200 --eval.every 25

On held-out rows the share of right answers goes from 0 to 0.88.
"""

import asyncio

from own_task import in_place

BRANCHES = 4


async def branches(task, client):
    more = {"logprobs": True, "extra_body": {"return_token_ids": True}}
    whole = await client.chat.completions.create(
        model="policy", messages=[{"role": "user", "content": task["prompt"]}], **more
    )
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
    rewards = in_place([text for _, text in answers], [task["answer"]] * BRANCHES)
    return dict(zip((reply for reply, _ in answers), rewards, strict=True))
