"""Several commands in one process, on one rank or more: `python command_lines.py 'train ...' 'replay-step ...'`.

Ends with the status of the first that fails, and is spared the start of a process for each of the others.
"""

import os
import shlex
import sys

from hybrid_grpo.__main__ import main

for line in sys.argv[1:]:
    if status := main(shlex.split(line)):
        os._exit(status)
sys.stdout.flush()
os._exit(0)
