from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from char_tokenizer import IDS, char_tokenizer
from rank_threads import in_ranks
from tiny_models import build, tiny_config

from hybrid_grpo.config import PolicyConfig, RolloutConfig
from hybrid_grpo.data.batch import Prompt
from hybrid_grpo.generation import GREEDY, Request, Sampling
from hybrid_grpo.model.attention import ATTENTION
from hybrid_grpo.model.logprobs import LogprobModel
from hybrid_grpo.policy import Policy, learning_rate, sampling_of


def rates(schedule, total=10, warmup=4):
    config = PolicyConfig(lr=1.0, lr_schedule=schedule, warmup_steps=warmup)
    return [learning_rate(config, step, total) for step in range(total)]


def test_warm_up_is_linear_and_its_last_step_has_the_full_rate():
    for schedule in ("constant", "linear", "cosine"):
        assert rates(schedule)[:4] == [0.25, 0.5, 0.75, 1.0]
        assert rates(schedule)[4] == 1.0


def test_the_shapes_after_warm_up():
    assert rates("constant")[4:] == [1.0] * 6
    assert rates("linear")[4:] == pytest.approx([1, 5 / 6, 4 / 6, 3 / 6, 2 / 6, 1 / 6])
    assert rates("cosine")[4:] == pytest.approx([1, 0.933013, 0.75, 0.5, 0.25, 0.066987], abs=1e-6)


def test_without_warm_up_and_past_the_end():
    assert rates("constant", total=3, warmup=0) == [1.0, 1.0, 1.0]
    assert learning_rate(PolicyConfig(lr=2.0, warmup_steps=8), 3, total=4) == 1.0


def test_sampling_is_that_of_the_configuration_and_greedy_keeps_what_ends_a_completion():
    config = RolloutConfig(
        max_completion_tokens=9, min_completion_tokens=2, temperature=0.7, top_p=0.9, top_k=5, min_p=0.1,
        repetition_penalty=1.2, logit_bias={"3": -1.0, "0": 2.0}, stop_strings=["x", "\n\n"], logprobs="sampling",
    )  # fmt: skip
    ends = {"max_tokens": 9, "min_tokens": 2, "stop_ids": (4, 7), "stop_strings": ("x", "\n\n")}
    filters = {"top_p": 0.9, "top_k": 5, "min_p": 0.1, "repetition_penalty": 1.2, "logit_bias": ((3, -1.0), (0, 2.0))}
    assert sampling_of(config, (4, 7)) == Sampling(temperature=0.7, logprobs="sampling", **ends, **filters)
    assert sampling_of(config, (4, 7), greedy=True) == Sampling(temperature=GREEDY, **ends)


def test_the_configuration_s_defaults_are_the_sampler_s():
    assert sampling_of(RolloutConfig(), (4,)) == Sampling(512, stop_ids=(4,))


def test_ignore_eos_leaves_the_limit_only():
    for greedy in (False, True):
        assert sampling_of(RolloutConfig(ignore_eos=True), (4,), greedy=greedy).stop_ids == ()


@pytest.mark.parametrize("decoder", ["paged", "transformers"])
def test_a_finished_completion_is_handed_on_decoded_and_returned_as_the_same(decoder):
    """None has an id that is no token, between others or beyond them, although the model prefers those."""
    view = build(tiny_config("qwen2", vocab_size=90), ATTENTION if decoder == "paged" else "sdpa")
    view.lm_head.weight.data[[IDS["b"], *range(len(IDS), 90)]] *= 20
    policy = Policy.__new__(Policy)
    policy._album = policy.turns = policy.journal = None
    policy.tokenizer, policy.engine = char_tokenizer(), SimpleNamespace(generation=lambda: nullcontext(view))
    policy.tokenizer.get_vocab = lambda: {token: at for token, at in IDS.items() if token != "b"}
    policy.workspace = None
    prompts = [Prompt(i, "", [1 + i], {}) for i in range(2)]
    config, seen = RolloutConfig(num_generations=2, max_completion_tokens=5, decoder=decoder), []
    rollout, _ = policy.rollout(prompts, config, (), seed=0, step=1, on_finish=lambda *args: seen.append(args))
    assert {(i, k) for i, k, _ in seen} == {(0, 0), (0, 1), (1, 0), (1, 1)}
    assert all(completion is rollout.completions[2 * i + k] for i, k, completion in seen)
    requests = [Request(prompt.token_ids, [0]) for prompt in prompts]
    greedy = [group[0] for group in policy.complete(requests, sampling_of(config, (), greedy=True), config)]
    assert {t for c in [*rollout.completions, *greedy] for t in c.token_ids} <= {*range(len(IDS))} - {IDS["b"]}
    for completion in [*rollout.completions, *greedy]:
        assert completion.text == policy.tokenizer.decode(completion.token_ids, skip_special_tokens=True)
    assert [completion.text for completion in rollout.completions] != [c.text for c in greedy for _ in range(2)]


def test_supervised_tokens_count_alike_whatever_rank_has_them():
    """The gradient of a supervised step is that of the mean over all tokens of all ranks:
    a rank of few tokens does not weigh them more. Ranks add their gradients up."""
    prompts = [[1, 2], [3], [4, 5, 6], [7], [8, 9]]
    completions = [[10, 11, 12, 13, 14], [15], [16, 17], [18, 19, 20, 21, 22, 23], [24]]

    def learned(parts):
        def program(rank):
            model, rows = build(tiny_config("qwen2"), "eager"), parts[rank]
            policy = Policy.__new__(Policy)
            policy.config, policy.packs = PolicyConfig(micro_batch_tokens=12), False
            policy.engine = LogprobModel(model)
            policy.engine.device = torch.device("cpu")
            policy.engine.backward = lambda loss: loss.backward()
            given = [prompts[row] for row in rows], [completions[row] for row in rows]
            losses = [
                (float(loss) * count, count) for loss, count in policy.accumulate_sft_gradient(*given, lambda: None)
            ]
            return losses, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}

        return in_ranks(len(parts), program)

    ((losses, whole),) = learned([range(5)])
    assert sum(count for _, count in losses) == 15 and max(float(g.abs().max()) for g in whole.values()) > 1e-3
    ranks = learned([[0, 3], [1], [2, 4]])
    for name, gradient in whole.items():
        assert torch.allclose(sum(of_rank[name] for _, of_rank in ranks), gradient, rtol=1e-4, atol=1e-7), name
    assert [sum(pair) for pair in zip(*(pair for of_rank, _ in ranks for pair in of_rank), strict=True)] == [
        pytest.approx(sum(loss for loss, _ in losses), rel=1e-5),
        15,
    ]
