"""Environments, clients and classes around clients, in the form of the documentation of openenv and of TRL."""

import os
import random
from typing import Literal
from uuid import uuid4

from fastmcp import FastMCP
from openenv.core import EnvClient, GenericEnvClient, MCPToolClient
from openenv.core.client_types import StepResult
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, ListToolsAction
from openenv.core.env_server.types import Action, Observation, State


class EchoAction(Action):
    message: str


class EchoObservation(Observation):
    echoed_message: str = ""


class EchoEnvironment(Environment):
    """Echoes, and is over with `bye`."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        self._state = State(episode_id=str(uuid4()), step_count=0)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs) -> EchoObservation:
        self.letter = random.Random(seed).choice("abcdefgh")
        return EchoObservation(echoed_message=f"Ready {self.letter}.", reward=0.0)

    def step(self, action: EchoAction | ListToolsAction | CallToolAction) -> EchoObservation:
        self._state.step_count += 1
        said = action.message
        return EchoObservation(echoed_message=said, reward=min(len(said) * 0.1, 1.0), done=said == "bye")

    @property
    def state(self) -> State:
        return self._state


class EchoEnv(EnvClient[EchoAction, EchoObservation, State]):
    def _step_payload(self, action):
        return {"message": action.message}

    def _parse_result(self, payload):
        seen = EchoObservation(
            echoed_message=payload["observation"]["echoed_message"], done=payload["done"], reward=payload["reward"]
        )
        return StepResult(observation=seen, reward=payload["reward"], done=payload["done"])

    def _parse_state(self, payload):
        return State(**payload)


class MoveAction(Action):
    direction: Literal["left", "right"]
    steps: int


class WalkObservation(Observation):
    place: int
    note: str | None = None


class Walk(Environment):
    """A place on a line, with actions of two fields; defines its methods as coroutines only."""

    def reset(self, start: int, **kwargs):
        raise NotImplementedError

    async def reset_async(self, start: int):
        self.place = start
        return WalkObservation(place=start)

    def step(self, action: MoveAction, timeout_s=None, **kwargs):
        raise NotImplementedError

    async def step_async(self, action: MoveAction):
        self.place += action.steps if action.direction == "right" else -action.steps
        return WalkObservation(place=self.place, reward=float(self.place == 3), done=self.place == 3)

    @property
    def state(self) -> State:
        return State()


class TurnAction(Action):
    action_id: int
    game: str = "dice"


class Dice(Environment[TurnAction, WalkObservation, State]):
    """Actions of one number, of which only the class tells the type."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation(metadata={"of": "no interest"})

    def step(self, action, timeout_s=None, **kwargs):
        return WalkObservation(place=action.action_id, reward=True, done=False)

    @property
    def state(self) -> State:
        return State()


class Tools(MCPEnvironment):
    """Tools, as today's echo environment has them."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        server = FastMCP("tools")

        @server.tool
        def echo_length(message: str) -> dict:
            """How long a message is."""
            return {"length": len(message)}

        @server.tool
        def echo_message(message: str):
            """A message again."""
            if message == "bad":
                raise ValueError("no such message")
            return message

        super().__init__(server)

    def reset(self, seed=None, episode_id=None, **kwargs):
        self.called = 0
        return Observation(done=False, reward=0.0, metadata={"message": "Echo environment ready!"})

    def step(self, action, timeout_s=None, **kwargs):
        return self._rewarded(action, super().step(action, timeout_s=timeout_s, **kwargs))

    async def step_async(self, action, timeout_s=None, **kwargs):
        return self._rewarded(action, await super().step_async(action, timeout_s=timeout_s, **kwargs))

    def _rewarded(self, action, seen):
        if isinstance(action, CallToolAction):
            self.called += 1
            seen.reward, seen.done = 0.5, self.called == 3
        return seen

    def _step_impl(self, action, timeout_s=None, **kwargs):
        raise NotImplementedError

    @property
    def state(self) -> State:
        return State()


echo_app = create_app(EchoEnvironment, EchoAction, EchoObservation, env_name="echo", max_concurrent_envs=64)
tools_app = create_app(Tools, CallToolAction, Observation, env_name="tools", max_concurrent_envs=64)


def echo_client():
    return EchoEnv(base_url=os.environ["ECHO_URL"])


def generic_client():
    return GenericEnvClient(base_url=os.environ["ECHO_URL"]).sync()


def tools_client():
    return MCPToolClient(base_url=os.environ["TOOLS_URL"])


class EchoToolEnv:
    """The class of TRL's documentation."""

    def __init__(self):
        self.env = EchoEnv(base_url=os.environ["ECHO_URL"])
        self.reward = 0.0

    def reset(self, **kwargs) -> str | None:
        self.env.reset()
        self.reward = 0.0
        return None

    def echo(self, message: str) -> str:
        """
        Echo the message back from the environment.

        Args:
            message: The message to echo

        Returns:
            The echoed message.
        """
        observation = self.env.step(EchoAction(message=message))
        self.reward = observation.observation.reward
        return observation.observation.echoed_message


def earned(environments, **kwargs):
    return [environment.reward for environment in environments]


class Unknown(Environment):
    """What its actions are is not told."""

    def reset(self, seed=None, episode_id=None, **kwargs):
        return Observation()

    def step(self, action, timeout_s=None, **kwargs):
        return Observation()

    @property
    def state(self):
        return State()
