"""The command `watch`: a page in the browser that shows runs, even while they train.

`folders` finds all runs to watch, and `watched_run` is a single run. `metrics_file` reads a run's metrics into columns
(`table`), and the traces of its steps. `rollouts` searches completions and reads their tokens. `answers` has the page's
answers: `server` sends them to a browser, and `frozen` writes them with the page (`page/`) to report.html.

Nothing here imports torch or writes any file but report.html, and a run does not know that it is watched.
"""
