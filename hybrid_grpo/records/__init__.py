"""The records of a run: metrics, rollouts, step traces, alarms, wandb, profiles, and the published model."""
