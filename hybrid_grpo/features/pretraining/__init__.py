"""Next-token prediction on texts, learned beside the rewards (PPO-ptx, InstructGPT, arXiv:2203.02155)."""
