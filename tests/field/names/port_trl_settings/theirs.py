import trl

common = {"learning_rate": 1e-5, "num_generations": 2, "beta": 0.04}
args = trl.GRPOConfig(**common, per_device_train_batch_size=4)
args.learning_rate = 5e-6
trl.GRPOTrainer(**dict(model="Qwen/Qwen2.5-0.5B", args=args), reward_funcs=[]).train()
