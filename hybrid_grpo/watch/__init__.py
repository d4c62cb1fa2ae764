"""`watch`: a page in the browser that shows runs, even while they train.

`watched_run` is one run, and `folders` finds all runs to watch. `metrics_file` reads a run's numbers into columns
(`table`), `trace_file` the traces of its steps (`prompt_rewards`, `histograms`); `rollouts` searches completions,
`tokens` reads the tokens of one, and `layers` shows where the steps' time went. `answers` answers the page's questions:
`server` sends the answers to a browser, and `frozen` writes them into report.html together with the page (`page/`).

Nothing here needs torch or writes anything but report.html, and a run does not know that it is watched.
"""
