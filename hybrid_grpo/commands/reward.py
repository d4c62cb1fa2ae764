"""`reward`: trains a reward model on pairs of answers."""

import os
from pathlib import Path

from hybrid_grpo.config import RewardStageConfig
from hybrid_grpo.config.checks import check_reward
from hybrid_grpo.config.parsing import Parsed, parse


def run(arguments: list[str]) -> None:
    """Parse the arguments and train."""
    reward(parse(RewardStageConfig, arguments, "reward"))


def reward(parsed: Parsed[RewardStageConfig]) -> Path:
    """Train a reward model as the configuration says; return the folder of the run. Raises UserError."""
    config = parsed.config
    check_reward(config, int(os.environ.get("WORLD_SIZE", "1")))

    from hybrid_grpo import engine
    from hybrid_grpo.commands.description import describe
    from hybrid_grpo.commands.stages.preferences import Preference, read_preferences
    from hybrid_grpo.commands.stages.reward import RewardTrainer
    from hybrid_grpo.data.sources import evaluation_source
    from hybrid_grpo.model.files import check_files
    from hybrid_grpo.model.limits import check_lengths, check_prompt_ids
    from hybrid_grpo.model.loading import load_tokenizer, weights_fact
    from hybrid_grpo.model.lora import check_lora
    from hybrid_grpo.model.scalar_model import check_scalar, padding_token
    from hybrid_grpo.policy import ScalarModelTrainer
    from hybrid_grpo.run.feature import make_features
    from hybrid_grpo.run.fingerprints import held_out_name, of_inputs
    from hybrid_grpo.run.folder import say
    from hybrid_grpo.run.training import TrainingRun
    from hybrid_grpo.watch.frozen import write_report

    device = engine.start(config.engine.timeout_minutes)
    engine.check_config(config.policy, config.engine)
    model_config = check_scalar(config.policy.model)
    check_lora(config.lora, model_config)
    check_files(config.policy.model, model_config, pickled=config.policy.pickled_weights)
    tokenizer = load_tokenizer(config.policy.model)
    pairs, report = read_preferences(config.data, config.reward, tokenizer)
    features = make_features(config)
    facts = {"data": report, "attention": describe(config.policy, device), **weights_fact(config.policy)}
    source = evaluation_source(config.data)
    held_out: list[Preference] = []
    if source is not None:
        held_out, facts["held out"] = read_preferences(config.data, config.reward, tokenizer, source)
    texts = [text for pair in pairs + held_out for text in pair.texts]
    check_lengths(model_config, max(map(len, texts)), "reward.max_tokens", what="the longest text")
    check_prompt_ids(texts, model_config)
    rows = {"training rows": pairs}
    if source is not None:
        rows[held_out_name("", source)] = held_out
    training = TrainingRun(parsed, facts, device, of_inputs(config, tokenizer, rows))
    if training.finished:
        return training.folder
    padding = padding_token(tokenizer, {text[-1] for text in texts})
    scorer = ScalarModelTrainer(
        config.policy, config.engine, tokenizer, config.run.steps, padding, lora=config.lora, seed=config.run.seed
    )
    for feature in features:
        feature.load(scorer)  # type: ignore[arg-type]  # those that need no rollouts load beside any model
    trainer = RewardTrainer(config, scorer, pairs, held_out, device, features, training.services)
    training.train(trainer, write_report)
    say(f"reward model: {training.folder / 'model'}")
    return training.folder
