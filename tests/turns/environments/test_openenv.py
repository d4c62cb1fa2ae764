"""Environments of the package openenv, where it is installed; turns are written down in place of a model."""

import threading
import time

import pytest
from foreign_runs import train
from paths import SUPPORT

from hybrid_grpo.config.errors import UserError
from hybrid_grpo.run.local_ranks import free_port
from hybrid_grpo.turns.environments.instances import EnvironmentEntry, load_environment
from hybrid_grpo.workers.calls import Call
from hybrid_grpo.workers.snapshots import Snapshot, restored

pytest.importorskip("openenv", minversion="0.10")

FILE = SUPPORT / "openenv_environments.py"


@pytest.fixture(scope="module", autouse=True)
def servers():
    import uvicorn

    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(SUPPORT))
        import openenv_environments

        running = []
        for name in ("echo", "tools"):
            port = int(free_port())
            patch.setenv(f"{name.upper()}_URL", f"http://127.0.0.1:{port}")
            app = getattr(openenv_environments, f"{name}_app")
            server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
            thread = threading.Thread(target=server.run)
            thread.start()
            running.append((server, thread))
        until = time.monotonic() + 120
        while not all(server.started for server, _ in running):
            assert time.monotonic() < until
            time.sleep(0.05)
        yield
        for server, thread in running:
            server.should_exit = True
            thread.join()


def process(name):
    return load_environment(EnvironmentEntry(f"{FILE}:{name}"), "rollout.environment")


def order(environment, do, **arguments):
    """What came of an order, or why it failed."""
    reply = environment.reply(Call({"request": [{"do": do, **arguments}]}, [0]))
    return reply.failures[0].message if reply.failures[0] else reply.values[0]


def begin(environment, **columns):
    columns = {"prompt": [{"role": "user", "content": "Begin."}], **columns}
    given = {"columns": columns, "seed": 1, "observation": None, "pictures": []}
    said = order(environment, "begin", **given, is_first=True)["said"]
    return said and said["text"]


ECHOED = [("hey", "hey", 0.3, False), ("a longer message", "a longer message", 1.0, False), ("bye", "bye", 0.3, True)]
JSON = '{"message": "bye"}'
PLAYS = {
    # The text of a turn is the only field that an action needs, and what it is told is its only field.
    "EchoEnvironment": ({}, "\n\nReady c.", ECHOED),
    # The same through a server.
    "echo_client": ({}, "\n\nReady c.", ECHOED),
    # A client that knows no fields sends and is told JSON.
    "generic_client": (
        {},
        "\n\nReady c.",
        [("hey", "error: Invalid JSON: expected value at line 1 column 1", 0.0, False), (JSON, "bye", 0.3, True)],
    ),
    # An action of several fields is JSON; what is none is told, and earns nothing.
    "Walk": (
        {"start": 1},
        '\n\n{"place": 1, "note": null}',
        [
            ("left", "error: Invalid JSON: expected value at line 1 column 1", 0.0, False),
            ('{"direction": "up"}', "error: direction: Input should be 'left' or 'right'; steps: Field", 0.0, False),
            ('{"direction": "right", "steps": 1}', '{"place": 2, "note": null}', 0.0, False),
            ('{"direction": "right", "steps": 1}', '{"place": 3, "note": null}', 1.0, True),
        ],
    ),
    "Dice": (
        {},
        None,
        [
            (" 4\n", '{"place": 4, "note": null}', 1.0, False),
            ('{"action_id": 5, "game": "two"}', '{"place": 5, "note": null}', 1.0, False),
            ("four", "error: action_id: Input should be a valid integer", 0.0, False),
        ],
    ),
}


@pytest.mark.parametrize("name", PLAYS)
def test_turns_are_actions(name):
    columns, first, turns = PLAYS[name]
    environment = process(name)
    assert environment.interface.schema["steps"] and environment.interface.required == [*columns]
    for _ in range(2):  # the same process, one completion after the other
        assert begin(environment, **columns) == first
        for text, said, reward, done in turns:
            found = order(environment, "step", text=text, is_last=False)
            assert found["said"]["text"].startswith(said)
            assert (found["reward"], found["done"]) == (pytest.approx(reward), done)
    assert not done or found["end"]["reward"] is None


def test_reward_functions_are_given_the_environment_itself_and_nothing_of_a_client():
    for name, letter in [("EchoEnvironment", "c"), ("echo_client", None)]:
        environment = process(name)
        begin(environment)
        end = order(environment, "step", text="bye", is_last=False)["end"]
        assert getattr(restored(Snapshot(end["state"])), "letter", None) == letter


@pytest.mark.parametrize("name", ["Tools", "tools_client"])
def test_tools_of_an_environment_are_tools_of_the_model(name):
    environment = process(name)
    schema = environment.interface.schema
    assert not schema["steps"]
    told = {tool["function"]["name"]: tool["function"] for tool in schema["tools"]}
    assert [*told] == ["echo_length", "echo_message"]
    assert told["echo_length"]["description"] == "How long a message is."
    assert told["echo_length"]["parameters"]["required"] == ["message"]
    for _ in range(2):
        assert begin(environment) is None
        calls = [("echo_length", "four"), ("echo_message", "hey"), ("echo_message", "bad"), ("echo_length", "five")]
        said = [order(environment, "call", tool=tool, arguments={"message": text}) for tool, text in calls]
        assert [one["said"]["text"] for one in said[:2]] == ['{"length": 4}', "hey"]
        assert "no such message" in said[2] and "it is over" in said[3]
        assert order(environment, "end")["reward"] == 1.5


def test_a_class_around_a_client_runs_as_in_trl():
    environment = process("EchoToolEnv")
    assert begin(environment) is None
    assert order(environment, "call", tool="echo", arguments={"message": "hey"})["said"] == {
        "text": "hey",
        "pictures": [],
    }
    state = order(environment, "end")["state"]
    assert restored(Snapshot(state)).reward == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("EchoEnv", r"a client needs the address of its server: give a function that returns EchoEnv\(base_url="),
        ("Unknown", "the type of its actions is not known: annotate the argument of step with it"),
    ],
)
def test_what_cannot_be_run_is_refused(name, message):
    with pytest.raises(UserError, match=rf"rollout\.environment .*{name}: {message}"):
        process(name)


@pytest.mark.ranks
def test_a_run_trains_with_a_server(tmp_path):
    lines = train(tmp_path, f"{FILE}:echo_client", "--log.rollouts_every", "1")
    turns = 0
    for line in lines:
        assert line["prompt"][-1]["content"][-10:-2] == "\n\nReady "
        spoken = [message["content"] for message in line["messages"] if message["role"] == "assistant"]
        heard = [message["content"] for message in line["messages"] if message["role"] == "user"]
        assert heard == spoken[: len(heard)], "it echoes"
        steps = spoken[: len(line["steps"])]
        assert [reward for _, reward in line["steps"]] == pytest.approx([min(len(s) * 0.1, 1.0) for s in steps])
        turns += len(steps)
    assert turns > len(lines) / 2
