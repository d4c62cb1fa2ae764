"""On-policy distillation: the policy learns from a teacher's view of its own completions (GKD, arXiv:2306.13649)."""
