"""Environments of the package verifiers, in the form of its documentation."""

import verifiers as vf
from datasets import Dataset


class Doubling(vf.MultiTurnEnv):
    """The model doubles a number until it is above 10."""

    async def setup_state(self, state):
        state["number"] = state["info"]["start"]
        return state

    @vf.stop
    async def is_over(self, state):
        return state["number"] > 10

    async def env_response(self, messages, state):
        if messages[-1].content == "break":
            raise vf.Error("broken")
        if messages[-1].content == "forget":
            messages.pop()
        if messages[-1].content == str(2 * state["number"]):
            state["number"] *= 2
        said = [{"role": "user", "content": f"It is {state['number']}."}]
        if state["number"] > 10:
            state["final_env_response"] = said
        return said


async def share(state, answer):
    """How near the number came to the answer."""
    return state["number"] / int(answer)


async def words(completion):
    """Messages of the conversation behind the prompt."""
    return len(completion)


ROWS = [{"question": "Begin.", "answer": "12", "info": {"start": 3}}]


def load_environment():
    rubric = vf.Rubric(funcs=[share, words], weights=[1.0, 0.01])
    return Doubling(dataset=Dataset.from_list(ROWS), rubric=rubric, system_prompt="Double it.")


def single():
    async def exact(completion, answer):
        return float(completion[-1].content == answer)

    return vf.SingleTurnEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[exact]))


def with_tools():
    def double(number: int) -> int:
        """Twice a number."""
        return 2 * number

    return vf.ToolEnv(dataset=Dataset.from_list(ROWS), rubric=vf.Rubric(funcs=[words]), tools=[double])
