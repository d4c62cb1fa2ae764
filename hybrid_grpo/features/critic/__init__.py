"""A value model that is trained together with the policy: PPO (arXiv:1707.06347) with GAE (arXiv:1506.02438)."""
