"""Programs with adapters that tests start under the launcher: see rank_programs.py."""

from pathlib import Path
from typing import Any

import torch
from rank_programs import made, main, two_steps

from hybrid_grpo.data.batch import MicroBatch, Rollout
from hybrid_grpo.distributed.ranks import all_reduce, world_size
from hybrid_grpo.run.saving.checkpoints import Checkpoints
from hybrid_grpo.trainer import Trainer

LORA = {"rank": 4, "alpha": 8}


def build(
    folder: Path, stage: int, *, lora: dict[str, Any] = LORA, gradient_checkpointing: bool = False,
    weights: str = "merged",
) -> Trainer:  # fmt: skip
    """A trainer of adapters on the letters and their tiny model, held close to the model without them."""
    return made(
        folder, run={"seed": 1},
        policy={"lr": 1e-2, "micro_batch_tokens": 160, "gradient_checkpointing": gradient_checkpointing}, lora=lora,
        engine={"zero_stage": stage}, data={"limit": 200, "eval_path": str(folder / "heldout.jsonl"), "eval_limit": 24},
        rollout={"prompts_per_step": 8, "num_generations": 4, "max_completion_tokens": 12, "max_slots": 16}
        | {"weights": weights}, grpo={"beta": 0.1 if lora else 0.0},
    )  # fmt: skip


def adapted(folder: Path) -> dict[str, Any]:
    """Two steps of adapters, in rollouts at stage 2 beside the weights, and the second again from a checkpoint."""
    stage = int(folder.name[-1])
    weights = "unmerged" if stage == 2 else "merged"
    trainer = build(folder.parent, stage, weights=weights)
    # Ranks are known once the engine is there.
    out = folder.with_name(f"{folder.name}.{world_size()}")
    checkpoints = Checkpoints(out / "checkpoints", keep=1)

    def save() -> None:
        checkpoints.save(trainer.policy.engine, 1, {"loader": trainer.loader.state_dict()})

    seen = two_steps(trainer, between=save)
    assert trainer.last_rollout is not None
    rollout, *_ = trainer.last_rollout
    trainer.policy.export(out / "exported")
    seen["optimizer"] = int(all_reduce(torch.tensor(_numbers(trainer.policy.engine.engine.optimizer.state_dict()))))
    seen["checkpoint_bytes"] = sum(p.stat().st_size for p in (out / "checkpoints").rglob("*") if p.is_file())
    seen["adapters"] = _sums(trainer)
    seen["base"] = _base_is_untouched(trainer)

    batches = trainer.micro_batches(rollout, range(len(rollout.completions)))
    base = build(folder.parent, stage, lora={})
    shape = (len(rollout.completions), max(len(c.token_ids) for c in rollout.completions))
    assert trainer.reference is not None
    ref_logp_BT = trainer.reference.logprobs(batches, shape, 1.0)
    seen["reference"] = all(_equal(base, micro, ref_logp_BT) for micro in batches)
    seen["moved"] = not all(_equal(trainer, micro, ref_logp_BT) for micro in batches if micro.rows)
    del base

    if world_size() == 1:
        seen["gradient"] = _gradient(trainer, batches, rollout, out)
    again = build(folder.parent, stage, weights=weights, gradient_checkpointing=True)
    newest, _ = checkpoints.newest_whole()
    assert newest is not None
    state = checkpoints.load(again.policy.engine, newest)
    again.loader.load_state_dict(state["loader"])
    again.step(2)
    seen["resumed"] = again.meter.reduce()
    return seen


def packed(folder: Path) -> dict[str, Any]:
    """Two steps of adapters beside a base in four bits, in rollouts too; in other folders as their names say."""
    weights = "merged" if folder.name in ("plain", "merged") else "unmerged"
    trainer = build(folder, 2, lora=LORA | {"load_in_4bit": folder.name != "plain"}, weights=weights)
    seen = two_steps(trainer)
    trainer.policy.export(folder / "exported")
    seen["adapters"] = _sums(trainer)
    seen["bytes"] = sum(p.nbytes for p in trainer.policy.engine.engine.module.parameters() if not p.requires_grad)
    return seen


def _numbers(state: Any) -> int:
    """Elements of all tensors in the state of an optimizer, counters aside."""
    if isinstance(state, torch.Tensor):
        return state.numel() if state.numel() > 1 else 0
    children = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    return sum(map(_numbers, children))


def _sums(trainer: Trainer) -> list[float]:
    assert trainer.policy.adapters is not None
    whole = trainer.policy.engine.whole(trainer.policy.adapters.parameters)
    return [float(weight.abs().double().sum()) for weight in whole.values()]


def _base_is_untouched(trainer: Trainer) -> bool:
    """Whether every weight that is not an adapter's is the one that was loaded."""
    from transformers import AutoModelForCausalLM

    policy = trainer.policy
    start = dict(AutoModelForCausalLM.from_pretrained(policy.config.model).named_parameters())
    trained = policy.engine.engine.module.named_parameters()
    ours = {name.removeprefix("model.").replace(".base_layer", ""): p for name, p in trained if not p.requires_grad}
    whole = policy.engine.whole(list(ours.values()))
    assert ours.keys() == start.keys()
    return all(torch.equal(whole[p], start[name].to(whole[p].device)) for name, p in ours.items())


def _equal(trainer: Trainer, micro: MicroBatch, ref_logp_BT: torch.Tensor) -> bool:
    """Whether the policy's log-probabilities are, to the bit, those of the reference."""
    with torch.no_grad():
        logp_bT, _ = trainer.policy.forward(micro, 1.0)
    return not micro.rows or torch.equal(logp_bT, ref_logp_BT[micro.rows, : logp_bT.shape[1]])


def _gradient(trainer: Trainer, batches: list[MicroBatch], rollout: Rollout, out: Path) -> dict[str, list[float]]:
    """Loss and gradient norm of the completions' likelihood, here and by peft and autograd on the exported adapter."""
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    losses = []
    for micro in batches:
        logp_bT, _ = trainer.policy.forward(micro, 1.0)
        loss = -logp_bT.sum() / 100
        trainer.policy.engine.backward(loss)
        losses.append(loss.detach())
    norm = trainer.policy.step().grad_norm

    base = AutoModelForCausalLM.from_pretrained(trainer.config.policy.model).to(trainer.device)
    model = PeftModel.from_pretrained(base, out / "exported" / "adapter", is_trainable=True)
    theirs = []
    for prompt, completion in zip(rollout.row_prompts, rollout.completions, strict=True):
        ids = torch.tensor([*prompt.token_ids, *completion.token_ids], device=trainer.device)
        logp_SV = model(ids[None]).logits[0, :-1].log_softmax(-1)
        logp_S = logp_SV.gather(1, ids[1:, None])[:, 0]
        theirs.append(-logp_S[len(prompt.token_ids) - 1 :].sum() / 100)
    sum(theirs).backward()  # type: ignore[union-attr]
    gradients = [p.grad for p in model.parameters() if p.requires_grad]
    return {
        "loss": [float(sum(losses)), float(sum(theirs).detach())],
        "norm": [norm, float(torch.cat([g.flatten() for g in gradients if g is not None]).norm())],
    }


if __name__ == "__main__":
    main(globals())
