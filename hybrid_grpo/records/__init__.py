"""What a run writes for those who watch it: metrics, rollouts, details, events, traces."""
