"""Features: what can be added to GRPO, a folder each, and taken out again.

A folder has the settings (`settings.py`, which imports no torch), what the feature does in a step (a
`hybrid_grpo.run.feature.Feature`) or in a command of its own (`command.py`), its mathematics, its share of the memory
plan (`memory.py`) and its metrics (`metrics.yaml`). The core knows none of them:
`hybrid_grpo.config.features.REGISTERED` names the folders. To remove a feature, delete its folder, its tests, its page
in docs and its entry there.
"""
