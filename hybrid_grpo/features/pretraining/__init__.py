"""Next-token prediction on texts, learned in addition to rewards (PPO-ptx, InstructGPT, arXiv:2203.02155)."""
