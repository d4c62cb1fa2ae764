from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.data.prompts import count_equal


def test_a_run_counts_the_held_out_prompts_that_it_trains_on():
    chat = [{"role": "system", "content": "x"}, {"role": "user", "content": "b  c"}]
    training = [Prompt(number, text, [], {}) for number, text in enumerate(["a", chat, "d + 1"])]
    assert count_equal(training, [Prompt(0, text, [], {}) for text in ("A!", "B c.", "d - 1", "e")]) == 2
