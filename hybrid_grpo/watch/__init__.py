"""`watch`: a page in the browser that shows runs, also while they train.

`watched_run` is one run and `folders` finds all that are watched. `metrics_file` has a run's numbers in columns
(`table`), `trace_file` the traces of its steps (`prompt_rewards`, `histograms`), `rollouts` finds completions, `tokens`
has those of one of them, and `layers` the times of all steps. `answers` has what the page asks for: `server` sends it
to a browser, and `frozen` writes it into report.html together with the page, which is in `page/`.

Nothing here needs torch or writes anything but report.html, and a run does not know that it is watched.
"""
