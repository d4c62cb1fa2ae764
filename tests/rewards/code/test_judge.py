"""What a program can send to the process that judges it."""

import multiprocessing
import pickle

import pytest

from hybrid_grpo.rewards.code import judge as judge_module
from hybrid_grpo.rewards.code.judge import Channel, Proxy


@pytest.fixture
def channels():
    ours, theirs = multiprocessing.Pipe()
    with ours, theirs:
        yield Channel(ours, trusting=False), Channel(theirs, trusting=True)


def test_a_forged_message_does_not_change_a_function_of_the_tests(channels):
    """It names the function and sets its attributes, as pickled objects set theirs. The judge used to hand out the
    function itself, so that a program could give it other defaults."""
    judge, _ = channels

    def expected(value=1):
        return value

    class Forged:
        def __init__(self, *state):
            self.state = state

        def __reduce__(self):
            return judge_module._kept, ("receiver", judge.keep(expected)), *self.state

    with pytest.raises(AttributeError):
        judge.load(pickle.dumps(Forged((None, {"__defaults__": (2,)}))))
    returned = judge.load(pickle.dumps(Forged()))
    assert expected.__defaults__ == (1,) and expected() == 1 and returned() == 1 and returned(3) == 3


@pytest.mark.parametrize("name", ["startswith", "endswith", "issubset", "isdisjoint", "equals", "isdigit"])
def test_an_object_of_the_program_is_not_asked_whether_it_is_what_was_expected(channels, name):
    """Its own method would see the expected value, and could say yes."""
    proxy = Proxy(channels[0], 0)
    with pytest.raises(AttributeError, match="an object of the program"):
        getattr(proxy, name)("expected")
    assert not channels[1]._connection.poll()
