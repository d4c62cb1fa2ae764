"""`sft`: trains by supervised fine-tuning."""

import os
from pathlib import Path

from hybrid_grpo.config import SftConfig
from hybrid_grpo.config.checks import check_sft
from hybrid_grpo.config.errors import refuse
from hybrid_grpo.config.parsing import Parsed, parse
from hybrid_grpo.model.doing import IMPORTING, Doing


def run(arguments: list[str]) -> None:
    sft(parse(SftConfig, arguments, "sft"))


def sft(parsed: Parsed[SftConfig]) -> Path:
    """Fine-tune as the configuration says; return the folder of the run. Raises UserError."""
    config = parsed.config
    check_sft(config, int(os.environ.get("WORLD_SIZE", "1")))
    with Doing(IMPORTING) as doing:
        from hybrid_grpo import engine
        from hybrid_grpo.commands.description import describe
        from hybrid_grpo.commands.pairs import read_pairs
        from hybrid_grpo.commands.sft_trainer import SftTrainer
        from hybrid_grpo.commands.verification import verified
        from hybrid_grpo.data.pictures import ImageStore
        from hybrid_grpo.model.files import check_files
        from hybrid_grpo.model.limits import check_lengths, check_prompt_ids, stop_ids
        from hybrid_grpo.model.loading import load_config, load_tokenizer, weights_fact
        from hybrid_grpo.model.lora import check_lora
        from hybrid_grpo.policy import Policy
        from hybrid_grpo.run.fingerprints import of_inputs
        from hybrid_grpo.run.folder import say
        from hybrid_grpo.run.training import TrainingRun
        from hybrid_grpo.watch.frozen import write_report

        device = engine.start(config.engine.timeout_minutes)
        doing("reading the data")
        engine.check_config(config.policy, config.engine)
        model_config = load_config(config.policy.model)
        album = ImageStore.of(config.policy.model, model_config)
        check_lora(config.lora, model_config)
        check_files(config.policy.model, model_config)
        tokenizer = load_tokenizer(config.policy.model)
        ends = stop_ids(config.policy.model, tokenizer, [], model_config)
        pairs, report = read_pairs(config.data, tokenizer, config.sft.max_completion_tokens, album, ends=ends)
        refuse(
            config.sft.batch_size > len(pairs),
            f"sft.batch_size {config.sft.batch_size} is more than the {len(pairs)} rows: lower it, or give more rows",
        )
        longest = max(len(pair.prompt.token_ids) + len(pair.completion_ids) for pair in pairs)
        check_lengths(model_config, longest, "data.max_prompt_tokens + sft.max_completion_tokens")
        check_prompt_ids([pair.prompt.token_ids + pair.completion_ids for pair in pairs], model_config)
        facts = {"data": report, "attention": describe(config.policy, device), **weights_fact(config.policy)}
        training = TrainingRun(parsed, facts, device, of_inputs(config, tokenizer, {"training rows": pairs}))
        if training.finished:
            return training.folder
        doing("loading the model")
        # The policy generates nothing: its view of the model is used only for the export.
        steps, seed, lora = config.run.steps, config.run.seed, config.lora
        policy = Policy(
            config.policy, config.engine, tokenizer, steps, decoder="transformers", lora=lora, seed=seed, album=album
        )
        say(f"weights: {verified(policy)}")
        doing.end()
        trainer = SftTrainer(config, policy, pairs, device, training.services)
        training.train(trainer, write_report)
        say(f"model: {training.folder / 'model'}")
        return training.folder
