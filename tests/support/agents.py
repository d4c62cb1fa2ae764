"""Agents for tests: loops around openai's client that do what their row says."""

import asyncio
import json
import os
import random
import time
from pathlib import Path

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look_up",
            "description": "Look a key up.",
            "parameters": {"type": "object", "properties": {"key": {"type": "string"}}, "required": ["key"]},
        },
    }
]


async def _said(client, messages, after_s=0.0, model="policy", **more):
    await asyncio.sleep(after_s)
    reply = await client.chat.completions.create(model=model, messages=messages, **more)
    return reply.choices[0].message.model_dump(exclude_none=True)


async def acts(task, client):
    """Talk for some turns; forget, split up, or misbehave, as the row says. What is drawn depends on the row alone."""
    draw, how = random.Random(task["seed"]), task["how"]
    tools = {"tools": TOOLS} if how == "tools" else {}
    if how == "nothing":
        return 1.0
    messages = [{"role": "system", "content": "s" * draw.randrange(40)}, *task["prompt"]]
    for turn in range(task["turns"]):
        await asyncio.sleep(draw.random() / 50)
        said = await _said(client, messages, max_tokens=draw.choice([None, 4]), **tools)
        messages.append(said)
        if how == "raises" and turn:
            raise ValueError("no luck")
        if how == "exits" and turn:
            os._exit(3)
        if how == "hangs" and turn:
            time.sleep(600)
        if how == "forgets" and turn % 2:
            messages = [*messages[:2], {"role": "user", "content": f"before: {turn}"}]
        if how == "splits":
            told = [[*messages, {"role": "user", "content": f"part {k}"}] for k in range(3)]
            parts = await asyncio.gather(
                *(_said(client, chat, after_s=k / 50) for k, chat in enumerate(told[: 1 + turn]))
            )
            messages.append({"role": "user", "content": "".join(str(part["content"])[:3] for part in parts)})
        for call in said.get("tool_calls", ()):
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": call["function"]["arguments"]})
        if messages[-1]["role"] == "assistant":
            messages.append({"role": "user", "content": "abcdefgh"[: draw.randrange(8)]})
    return "text" if how == "text" else float(len(messages))


async def talks(task, client):
    """Answer a turn by its letters; forget all but the question where it has none. Two speak in turn."""
    messages, count = list(task["prompt"]), 0
    for turn in range(5):
        said = await _said(client, messages, model=("first", "second")[turn % 2], max_tokens=6, tools=TOOLS)
        heard = "".join(letter for letter in said["content"] if letter in "abcd")[:3]
        count += len(heard)
        messages = [*messages, said, {"role": "user", "content": heard}] if heard else list(task["prompt"])
    return {"first": float(count), "second": -float(len(messages))}


async def writes_tokens(task, client):
    """Go from tokens to tokens, as the clients of verifiers do, and check what comes back."""
    ids, count = [5, 6, 7, 8] * 12, 0
    for _ in range(task["turns"]):
        body = {"model": "policy", "token_ids": ids, "sampling_params": {"max_tokens": 5, "logprobs": 1}}
        reply = (await client.post("/../inference/v1/generate", body=body, cast_to=object))["choices"][0]
        content = reply["logprobs"]["content"]
        assert [entry["token"] for entry in content] == [f"token_id:{token}" for token in reply["token_ids"]]
        assert all(-50 < entry["logprob"] <= 0 for entry in content) and reply["finish_reason"] in ("stop", "length")
        ids, count = [*ids, *reply["token_ids"], 9, 10], count + len(content)
    return float(count)


async def branches(task, client):
    """Begin again with what has been read, up to the end of a page, and to the middle of one. If the row names a file,
    continue the last, want what the sampler recorded, and write it there."""
    first, replies = [5, 6, 7, 8] * 24, []
    for ids in (first, first[:64] + [9] * 40, first[:80] + [10] * 40, None)[: 4 if "file" in task else 3]:
        more = {"return_routed_experts": True, "return_sampling_mask": True} if "file" in task else {}
        if ids is None:
            more["routed_experts_prompt_start"] = 100
            ids = [*first[:80], *[10] * 40, *replies[-1]["token_ids"], 11]
        body = {"model": "policy", "token_ids": ids, "sampling_params": {"max_tokens": 5, **more}}
        replies += (await client.post("/../inference/v1/generate", body=body, cast_to=object))["choices"]
    if "file" in task:
        Path(task["file"]).write_text(json.dumps(replies), encoding="utf-8")
    return 1.0


async def looks(task, client):
    """Look at the row's first picture, and then at the second; begin anew with both, or as before."""
    [message], text = task["prompt"], {"type": "text", "text": "And this?"}
    one, two = (part for part in message["content"] if part["type"] == "image_url")
    first, second = {"role": "user", "content": [text, one]}, {"role": "user", "content": [two, text]}
    said = await _said(client, [first], max_tokens=4)
    for chat in ([first, said, second], [message], [first, second], [{**first, "content": [text, one, text]}]):
        await _said(client, chat, max_tokens=4)
    try:
        await _said(client, [{"role": "user", "content": [{**one, "image_url": {"url": "https://a.org/b.png"}}]}])
    except Exception as error:
        return float("https://a.org/b.png is not fetched" in str(error) and error.status_code == 400)


looks.shows_pictures = True


async def rewards_parts(task, client):
    """White and black speak in one chat; or two replies go on with a beginning, and a third with part of it."""
    if task["how"] == "roles":
        chat = list(task["prompt"])
        for role in ("white", "black", "white", "grey"):
            reply = await client.chat.completions.create(model=role, messages=chat, max_tokens=5)
            chat += [reply.choices[0].message.model_dump(exclude_none=True), {"role": "user", "content": role}]
        return {"white": 1.0, "black": -1.0 if task["seed"] else 0.0}
    more = {"max_tokens": 6, "extra_body": {"return_token_ids": True}}
    root = await client.chat.completions.create(model="policy", messages=task["prompt"], **more)
    ids = [*root.prompt_token_ids, *root.choices[0].token_ids]
    found = {root.id: 9.0} if task["how"] == "root" else {}
    for beginning in (ids, [*ids, 9, 10], [*ids[:-2], 9]):
        body = {"token_ids": beginning, "sampling_params": {"max_tokens": 4}}
        reply = await client.post("/../inference/v1/generate", body=body, cast_to=object)
        assert isinstance(reply["choices"][0]["text"], str)
        found[reply["request_id"]] = float(len(found))
    return {"nobody": 1.0} if task["how"] == "nobody" else found


def waits(task, client):
    """An agent without async, whose client streams."""
    text = ""
    for chunk in client.chat.completions.create(model="policy", messages=task["prompt"], stream=True):
        text += chunk.choices[0].delta.content or "" if chunk.choices else ""
    listed = [model.id for model in client.models.list()]
    asked = client.chat.completions.create(model="policy", messages=task["prompt"], logprobs=True)
    assert listed == ["policy"] and asked.choices[0].logprobs.content
    return float(len(text))


def forgets_its_client(task):
    return 0.0


PROGRAM = """
const task = JSON.parse(require("fs").readFileSync(0, "utf8"));
const call = (messages) => fetch(process.env.OPENAI_BASE_URL + "/chat/completions", {
  method: "POST",
  headers: {"Content-Type": "application/json", Authorization: "Bearer " + process.env.OPENAI_API_KEY},
  body: JSON.stringify({model: process.env.OPENAI_MODEL, messages}),
}).then((reply) => reply.json());
(async () => {
  const messages = [...task.prompt];
  for (let turn = 0; turn < 2; turn++) {
    messages.push((await call(messages)).choices[0].message, {role: "user", content: "more"});
  }
  console.log("said", messages.length);
  console.log(messages.length);
})();
"""


def rows(hows, turns=3):
    """A row for each way to act."""
    return [
        {"prompt": [{"role": "user", "content": f"row {k} " + "x" * (7 * k)}], "how": how, "seed": k, "turns": turns}
        for k, how in enumerate(hows)
    ]


if __name__ == "__main__":
    print(json.dumps(rows(["forgets", "splits", "tools"])))
