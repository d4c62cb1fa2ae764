"""Ready-made tasks: a data set, its prompts and its rewards under one name, `data.task`.

A task is a set of defaults. It is looked up while settings are parsed, so that what it says stands in the resolved
configuration, and what the user says wins. Knows neither torch nor `datasets`.
"""

from hybrid_grpo.data.tasks.recipe import Row, TaskRecipe, column, text
from hybrid_grpo.data.tasks.registry import TASKS, load_task, make_rows, map_rows, task_settings

__all__ = ["TASKS", "Row", "TaskRecipe", "column", "load_task", "make_rows", "map_rows", "task_settings", "text"]
