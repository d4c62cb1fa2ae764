"""What is added to GRPO, a folder each. Every one of them can be taken out.

A folder has the feature's settings (`settings.py`, which imports no torch), what it does in a step (a
`hybrid_grpo.run.feature.Feature`), its mathematics, its share of the memory plan (`memory.py`) and its metrics
(`metrics.yaml`). The core knows none of them: `hybrid_grpo.config.features.REGISTERED` names the folders. To remove a
feature, delete its folder, its tests, its page in docs and its entry there.
"""
