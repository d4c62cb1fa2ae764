"""The longest groups of a step are carried into the next one: which they are, what is learned from them, and runs."""

import json
import random
from collections import Counter
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from pyarrow import parquet
from rank_threads import in_ranks
from workshop import Workshop

from hybrid_grpo.config import BatchPlan, GrpoConfig, RolloutConfig, TrainConfig
from hybrid_grpo.config.checks import batch_plan
from hybrid_grpo.config.errors import UserError
from hybrid_grpo.data.batch import Completion, Prompt, Rollout, Scores, TrainBatch
from hybrid_grpo.data.completion_records import record_of
from hybrid_grpo.data.loader import TrainingPrompts
from hybrid_grpo.data.packing import pack
from hybrid_grpo.distributed.ranks import exchange_objects, rank
from hybrid_grpo.generation import Stats, stream_key
from hybrid_grpo.grpo.loss import micro_batch_loss
from hybrid_grpo.grpo.resampling import group_slots
from hybrid_grpo.model.sidecars import TokenRow
from hybrid_grpo.policy import Policy
from hybrid_grpo.records.metrics.measurements import measure_parity
from hybrid_grpo.run import carry
from hybrid_grpo.run.carry import Carry

RUN = [
    *("train", "--config=train.yaml", "--run.steps=6", "--rollout.carry=0.5", "--rollout.max_carries=2"),
    *("--rollout.num_generations=2", "--rollout.max_completion_tokens=56", "--policy.lr=1e-3"),
    *("--checkpoint.every=3", "--log.rollouts_every=1", "--grpo.num_minibatches=2"),
]


def test_how_many_policies_sampled_a_completion():
    completion = Completion(list(range(9)), [0.0] * 9, "stop")
    assert (completion.old_tokens, completion.new_tokens, completion.policies) == (0, 9, 1)
    for carried, policies in (((4,), 2), ((4, 4, 7), 3), ((9,), 1), ((2, 9, 9), 2)):
        other = replace(completion, carried=carried)
        assert (other.policies, other.old_tokens, other.new_tokens) == (policies, carried[-1], 9 - carried[-1])
    rows = [completion, replace(completion, carried=(4,))]
    assert Rollout([Prompt(0, "", [1], {})], rows, 2).is_old_BT.sum(1).tolist() == [0, 4]
    assert Rollout([Prompt(0, "", [1], {})], rows[:1], 1).is_old_BT is None


@pytest.mark.parametrize("recomputed", [False, True])
def test_tokens_of_older_policies_have_their_recorded_log_probabilities(recomputed):
    """The first optimizer step's ratio is 1 for tokens of the present policy, and exp(logp - recorded) for others."""
    logp_bT = torch.tensor([[-1.0, -2.0, -0.5, -1.5]], requires_grad=True)
    recorded_bT, is_old_bT = torch.tensor([[-1.2, -1.7, -9.0, -9.0]]), torch.tensor([[True, True, False, False]])
    given = logp_bT.detach() if recomputed else None
    (micro,) = pack(TokenRow.of([[1, 2]], [[3, 4, 5, 6]]), 100, torch.device("cpu"), share="on")
    batch = TrainBatch(micro, recorded_bT, given, None, torch.ones(1, 4), torch.full((1, 4), 0.25))
    grpo = GrpoConfig(epsilon_low=0.5, epsilon_high=0.5)
    loss, numbers = micro_batch_loss(replace(batch, is_old_bT=is_old_bT), logp_bT, torch.zeros(1, 4), grpo, 0.0)
    ratio_T = torch.tensor([0.2, -0.3, 0.0, 0.0]).exp()
    assert loss.item() == pytest.approx(-float(ratio_T.mean()))
    assert float(numbers["policy/ratio_max"][0]) == pytest.approx(float(ratio_T.max()))
    (gradient_bT,) = torch.autograd.grad(loss, logp_bT)
    assert gradient_bT[0].tolist() == pytest.approx((-ratio_T / 4).tolist())
    parity = measure_parity(replace(batch, is_old_bT=is_old_bT), logp_bT)
    assert parity["parity/logp_abs_diff_mean"] == (pytest.approx(8.0), 2), "old tokens say nothing of the sampler"


def test_completions_are_not_carried_over_to_a_prompt_that_has_changed():
    """With run.allow_changes a row may be corrected: completions of the old row had gone on below the new one."""

    def carry(prompt_id, token_ids):
        prompts = [Prompt(prompt_id, "", token_ids, {}, source="a")]
        return Carry(RolloutConfig(carry=0.5), BatchPlan(1, 2, 1, 1, 1), prompts, lambda sent: [sent])

    first, record = carry(4, [1, 2]), json.dumps(record_of(Completion([5], [-1.0], "open")))
    first.load_state_dict([{"prompt": ("a", 4, 1), "serial": (3, 0), "completions": [record]}])
    again = carry(4, [1, 2])
    again.load_state_dict(first.state_dict())
    assert again.state_dict() == first.state_dict()
    for other in (carry(4, [1, 3]), carry(5, [1, 2])):
        with pytest.raises(UserError, match=r"^rollout.carry: .* of prompt 4, which the data lacks or has changed"):
            other.load_state_dict(first.state_dict())


G, SEED, CPU = 2, 5, torch.device("cpu")


def stream(key):
    """The tokens that a random stream samples."""
    draw = random.Random(key)
    return [draw.randrange(99) for _ in range(draw.choice([1, 2, 4, 30, 90]))]


class Streams(Policy):
    """Samples from these streams; how many of its sequences get a token before the next look depends on the rank."""

    def __init__(self):
        self.engine, self._album, self.journal = SimpleNamespace(generation=nullcontext), None, None

    def _complete(self, view, requests, sampling, config, callbacks):
        draw = random.Random(rank())
        rows = [(i, k) for i, request in enumerate(requests) for k in range(len(request.keys))]
        made = {(i, k): requests[i].resumed_from[k] or Completion([], [], "open") for i, k in rows}
        while left := [row for row in rows if made[row].finish == "open"]:
            if callbacks.should_stop(lambda: min(made[row].new_tokens for row in left)):
                break
            for i, k in draw.sample(left, draw.randint(1, len(left))):
                whole, tokens = stream(requests[i].keys[k]), len(made[i, k].token_ids) + 1
                finish = "stop" if tokens >= len(whole) else "open"
                made[i, k] = replace(made[i, k], token_ids=whole[:tokens], logp=[-1.0] * tokens, finish=finish)
                if finish == "stop":
                    callbacks.on_finish(i, k, made[i, k])
        return [[made[i, k] for k in range(len(request.keys))] for i, request in enumerate(requests)], Stats()


def carried_by_definition(config, loader, steps):
    """Of each step: the span, the number of tokens of what is left open, and the groups that are learned from, each as
    its serial, its prompt, and the streams and carried counts of its completions."""
    rollout, groups = config.rollout, {}
    for step in range(1, steps + 1):
        new = loader.next_prompts(config.grpo.num_minibatches)
        missing = rollout.carried_groups - len(groups)
        new += loader.more_prompts(missing, list(range(missing))) if missing > 0 else []
        for number, prompt in enumerate(new):
            tokens = [stream(stream_key(SEED, step, prompt.epoch, prompt.id, k)) for k in range(G)]
            groups[step, number] = (prompt.id, prompt.epoch), tokens, [()] * G

        def spans(group):
            return max(len(of) - (before or (0,))[-1] for of, before in zip(group[1], group[2], strict=True))

        order = sorted(groups, key=lambda s: (len(groups[s][2][0]) < rollout.max_carries, spans(groups[s]), s))
        span = max(spans(groups[serial]) for serial in order[: rollout.prompts_per_step])
        learned = [(serial, *groups.pop(serial)) for serial in sorted(order[: rollout.prompts_per_step])]
        for serial, (prompt, streams, carried) in groups.items():
            pairs = zip(streams, carried, strict=True)
            ends = [(*before, min(len(of), (before or (0,))[-1] + span)) for of, before in pairs]
            groups[serial] = prompt, streams, ends
        left = [ends[-1] for *_, carried in groups.values() for ends in carried]
        yield span, sum(left) / len(left), learned


@pytest.mark.parametrize("worlds", [(1, 1), (2, 1), (1, 2)])
@pytest.mark.parametrize(("share", "most"), [(0.25, 1), (0.5, 1), (0.5, 2)])
def test_groups_are_carried_as_the_definition_says_on_any_ranks_and_after_a_resume(worlds, share, most, monkeypatch):
    """Ten steps, of which the last five are made by other ranks, from what the first have saved."""
    monkeypatch.setattr(carry, "_LOOK_S", 0.0)
    rollout = RolloutConfig(prompts_per_step=4, num_generations=G, carry=share, max_carries=most)
    config = TrainConfig(rollout=rollout, grpo=GrpoConfig(num_minibatches=2))
    prompts = TrainingPrompts([Prompt(i, "", [i + 1], {}) for i in range(9)], "")

    def steps_of(plan, numbers, saved, own):
        loader = prompts.loader(config, plan, CPU)
        carry = Carry(rollout, plan, prompts.prompts, partial(exchange_objects, device=CPU))
        parts, made = {"loader": loader, "carry": carry}, []
        for name, state in saved.items():
            parts[name].load_state_dict(state)
        for step in numbers:
            told = Counter()
            drawn = carry.begin(loader.next_prompts(2), loader, step)
            heard = carry.by_group(lambda i, k, _: told.update([i] * (1 + k)))  # noqa: B023
            given = {"resumed_from": carry.resumed_from, "should_stop": carry.should_stop, "on_finish": heard}
            sampled, _ = Streams().rollout(drawn, rollout, (), seed=SEED, step=step, **given)
            sampled = carry.end(sampled)
            assert set(carry.learned) <= told.keys() and set(told.values()) == {1 + 2}, "whole groups, each once"
            rewards = [float(sum(c.token_ids)) for c in sampled.groups(carry.learned).completions]
            home, scores = carry.gather(sampled, Scores(torch.tensor(rewards), {}, {}))
            assert scores.reward_B.tolist() == [sum(c.token_ids) for c in home.completions]
            made.append((home, carry.numbers(home)))
        return made, {name: part.state_dict() for name, part in parts.items()}

    made, saved = [], {}
    for world, numbers in zip(worlds, (range(1, 6), range(6, 11)), strict=True):
        plan = batch_plan(config, world)
        found = in_ranks(world, partial(steps_of, plan, numbers, saved))
        saved = found[0][1]
        assert all(state == saved for _, state in found)
        assert (serials := [group["serial"] for group in saved["carry"]]) == sorted(serials)
        made += zip(*(steps for steps, _ in found), strict=True)
    expected = carried_by_definition(config, prompts.loader(config, batch_plan(config, 1), CPU), 10)
    for of_ranks, (span, length, groups) in zip(made, expected, strict=True):
        tokens = old = 0
        for own, (home, numbers) in enumerate(of_ranks):
            share = 4 // len(of_ranks)
            for slot, prompt, at in zip(
                group_slots(share, 2, own, len(of_ranks)), home.prompts, range(share), strict=True
            ):
                (begun, _), place, streams, carried = groups[slot]
                rows = home.groups([at]).completions
                assert ((prompt.id, prompt.epoch), prompt.first_step or begun) == (place, begun)
                assert [(c.token_ids, c.carried, c.finish) for c in rows] == [
                    (of, before, "stop") for of, before in zip(streams, carried, strict=True)
                ]
            assert numbers["carry/span"] == (span, 1) and numbers["carry/open_length"][0] == length
            assert numbers["carry/policies_max"][0] == max(c.policies for c in home.completions)
            share, count = numbers["carry/old_frac"]
            tokens, old = tokens + count, old + share * count
        assert tokens == sum(len(of) for _, _, streams, _ in groups for of in streams)
        assert old == pytest.approx(sum((ends or (0,))[-1] for *_, carried in groups for ends in carried))


@pytest.mark.ranks
def test_a_run_carries_groups_and_is_the_same_on_one_rank_and_on_two(tmp_path):
    workshop, metrics = Workshop(tmp_path), []
    for ranks in (1, 2):
        done = workshop.run(*RUN, f"--run.name=of{ranks}", ranks=ranks)
        assert done.status == 0, done.err
        lines = (tmp_path / f"runs/of{ranks}/metrics.jsonl").read_text().splitlines()
        metrics.append([line for line in map(json.loads, lines) if line["step"]])
    workshop.close()
    for one, two in zip(*metrics, strict=True):
        ours, theirs = (
            {
                (row["prompt_id"], row["epoch"], row["sample"]): (
                    row["token_ids"],
                    row["finish"],
                    row.get("carried") or [],
                )
                for row in parquet.read_table(folder / f"step_{one['step']:06d}.parquet").to_pylist()
            }
            for folder in (tmp_path / "runs/of1/rollouts", tmp_path / "runs/of2/rollouts")
        )
        assert ours == theirs and len(ours) == 8, "each step learns from as many groups"
        for name in ("reward/mean", "carry/span", "carry/old_frac", "carry/open_length", "completion/sampled_tokens"):
            assert one[name] == pytest.approx(two[name], rel=1e-12), name
        for name in ("policy/loss", "policy/grad_norm", "policy/ratio_max"):
            assert one[name] == pytest.approx(two[name], rel=1e-4, abs=1e-6), name
        assert one["parity/logp_abs_diff_max"] < 1e-4
    assert max(one["carry/policies_max"] for one in metrics[0]) > 1
