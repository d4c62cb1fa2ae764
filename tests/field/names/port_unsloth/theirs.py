# The settings of a notebook; nothing here is run.
from datasets import load_dataset
from trl import GRPOConfig, GRPOTrainer
from unsloth import FastLanguageModel
from vllm import SamplingParams

rank = 32
model, tokenizer = FastLanguageModel.from_pretrained(
    model_name="unsloth/DeepSeek-R1-0528-Qwen3-8B", max_seq_length=1024, load_in_4bit=True, fast_inference=True,
    max_lora_rank=rank, gpu_memory_utilization=0.9
)  # fmt: skip
model = FastLanguageModel.get_peft_model(
    model, r=rank, target_modules=["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    lora_alpha=rank * 2, use_gradient_checkpointing="unsloth", random_state=3407
)  # fmt: skip
dataset = load_dataset("open-r1/DAPO-Math-17k-Processed", "en", split="train")
maximum_length = max(len(tokenizer(row["prompt"]).input_ids) for row in dataset)
match_format_exactly = check_answer = len
training_args = GRPOConfig(
    vllm_sampling_params=SamplingParams(min_p=0.1, seed=3407), temperature=1.0, learning_rate=5e-6, weight_decay=0.01,
    warmup_ratio=0.1, lr_scheduler_type="linear", optim="adamw_8bit", logging_steps=1, per_device_train_batch_size=1,
    gradient_accumulation_steps=1, num_generations=4, max_prompt_length=maximum_length + 1, max_completion_length=512,
    max_steps=100, save_steps=100, report_to="none", output_dir="outputs"
)  # fmt: skip
trainer = GRPOTrainer(
    model=model, reward_funcs=[match_format_exactly, check_answer], args=training_args, train_dataset=dataset
)
