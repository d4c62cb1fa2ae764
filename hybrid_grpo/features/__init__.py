"""Features: optional additions to GRPO, one folder each, which can be removed again.

A folder contains the feature's settings (`settings.py`, which imports no torch), what it does in a run (a
`hybrid_grpo.run.feature.Feature`, which also names its share of the memory plan), its mathematics and its metrics
(`metrics.yaml`). The core refers to no feature: only `hybrid_grpo.config.features.REGISTERED` lists the folders. To
remove a feature, delete its folder, its tests, its page in docs, and its entry in this list.
"""
