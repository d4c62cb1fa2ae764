"""Ready-made tasks: a YAML file of settings and a function that reads a row, both under one name, `data.task`.

The settings are stacked below those of the user while these are read. Imports neither torch nor `datasets`.
"""

from hybrid_grpo.config.tasks import Row, TaskRecipe
from hybrid_grpo.data.tasks.columns import column, text
from hybrid_grpo.data.tasks.registry import TASKS, load_task, make_rows, map_rows, row_reader

__all__ = ["TASKS", "Row", "TaskRecipe", "column", "load_task", "make_rows", "map_rows", "row_reader", "text"]
