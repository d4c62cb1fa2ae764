"""`watch`: a page in the browser over the folders of runs, also while they train.

`records` reads what anyone may have written, and `growing_file` files as they are written: `metrics_file` has their
numbers in columns (`table`), `details_file` what was noted of steps (`prompt_rewards`, `histograms`). `folder` is one
run and `folders` all runs that are watched, `rollouts` finds completions, `tokens` has those of one of them, `thinning`
makes curves for a screen and `layers` the times of all steps. `answers` has what the page asks for: `server` sends it
to a browser, and `frozen` writes it into report.html, with the page itself. The page is in `page/`. Nothing here needs
torch or writes anything but report.html, and a run does not know that it is watched.
"""
