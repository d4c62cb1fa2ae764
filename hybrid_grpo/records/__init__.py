"""What a run leaves and shows: metrics, rollouts, step traces, alarms, trackers, profiles, the published model."""
