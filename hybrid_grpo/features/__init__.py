"""Features: optional additions to GRPO, one folder each, which can be removed again.

A folder contains the feature's settings (`settings.py`, which imports no torch), its work in a step (a
`hybrid_grpo.run.feature.Feature`) or its own command (`command.py`), its mathematics, its share of the memory plan
(`memory.py`) and its metrics (`metrics.yaml`). The core refers to no feature: only
`hybrid_grpo.config.features.REGISTERED` lists the folders. To remove a feature, delete its folder, its tests, its page
in docs, and its entry in this list.
"""
