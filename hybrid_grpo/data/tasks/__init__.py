"""Ready-made tasks: for each name in `data.task`, a YAML file of settings and a function that converts a row.

The user's settings override the settings of the task. This package imports neither torch nor `datasets`.
"""

from hybrid_grpo.config.tasks import Row, TaskRecipe
from hybrid_grpo.data.tasks.columns import column, text
from hybrid_grpo.data.tasks.registry import TASKS, load_task, make_rows, row_reader

__all__ = ["TASKS", "Row", "TaskRecipe", "column", "load_task", "make_rows", "row_reader", "text"]
