"""The look-up task's agent: a loop of its own around openai's client, with the task's tool."""

import json

from lookup_tools import look_up

TOOL = {
    "type": "function",
    "function": {
        "name": "look_up",
        "description": "Look a key up in the hidden table.",
        "parameters": {
            "type": "object",
            "properties": {"key": {"type": "string", "description": "four small letters."}},
            "required": ["key"],
        },
    },
}


async def lookup(task, client):
    messages = list(task["prompt"])
    for _ in range(3):
        reply = await client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
        said = reply.choices[0].message
        messages.append(said.model_dump(exclude_none=True))
        if not said.tool_calls:
            break
        for call in said.tool_calls:
            found = look_up(**json.loads(call.function.arguments))
            messages.append({"role": "tool", "tool_call_id": call.id, "content": found})
    return float(messages[-1]["content"] == task["answer"])
