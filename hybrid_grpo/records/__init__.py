"""The records of a run: metrics, rollouts, step traces, alarms, trackers, profiles, and the published model."""
