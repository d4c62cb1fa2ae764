"""From rows to prompts, from rollouts to micro-batches."""
