import trl
from datasets import load_dataset

dataset = load_dataset("trl-lib/tldr", split="train")
evals = load_dataset("trl-lib/tldr", split="validation")


def reward_len(completions, **kwargs):
    return [-abs(20 - len(completion)) for completion in completions]


training_args = trl.GRPOConfig(output_dir="Qwen2-0.5B-GRPO", top_k=-1)
trainer = trl.GRPOTrainer(
    model="Qwen/Qwen2-0.5B-Instruct", reward_funcs=["org/rm", reward_len], args=training_args, train_dataset=dataset
)
