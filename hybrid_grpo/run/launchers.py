"""Finds out which rank this process is, from the environment variables of its launcher.

The deepspeed launcher and torchrun set the ones that torch reads (RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR,
MASTER_PORT). srun and mpirun set others; if these were ignored, each task would train alone, all in the same folder.
"""

import os
import re

from hybrid_grpo.config.errors import refuse

_RANK = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
_STARTERS = {
    "srun": ("SLURM_PROCID", "SLURM_STEP_NUM_TASKS", "SLURM_LOCALID", "SLURM_STEP_TASKS_PER_NODE"),
    "mpirun": tuple(f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK", "LOCAL_SIZE")),
    "mpiexec": ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
"""By launcher: variables of the rank, of the number of tasks, and of the same two within this machine. Those of srun
describe the job step, since a batch script, which is a single process, has the variables of the whole job too."""


def adopt_rank() -> None:
    """Set torch's variables for a task that srun or mpirun has started.

    Raises:
        UserError: if there are several tasks, and the environment does not say which one this is or where they connect.
            An empty variable counts as unset.
    """
    for name in (*_RANK, "LOCAL_SIZE", "LOCAL_WORLD_SIZE", "DS_ACCELERATOR"):
        if os.environ.get(name) == "":
            del os.environ[name]
    named = [name for name in _RANK if name in os.environ]
    if "RANK" in named or "WORLD_SIZE" in named:
        missing = [name for name in _RANK if name not in named]
        refuse(
            bool(missing) and os.environ.get("WORLD_SIZE", "2") != "1",
            f"{', '.join(named)} without {', '.join(missing)}: the environment describes ranks only in part: start with"
            " deepspeed, torchrun, srun or mpirun, or unset these variables",
        )
        if missing:
            # A rank that is alone: the engine forms a group of one.
            for name in named:
                del os.environ[name]
        return
    for starter, names in _STARTERS.items():
        rank, size, local_rank, local_size = (os.environ.get(name, "") for name in names)
        if not rank.isdigit() or not size.isdigit() or int(size) == 1:
            continue
        refuse(not local_rank.isdigit(), f"{starter} has started {size} tasks without setting {names[2]}: set it")
        here = re.match(r"\d+", local_size)
        address = os.environ.get("MASTER_ADDR") or ("127.0.0.1" if here and here[0] == size else _first_host())
        refuse(
            not address,
            f"{starter} has started {size} tasks on several machines: set MASTER_ADDR to the name of the first one",
        )
        # Two runs on one machine must not share a port: each job has its own number.
        job = int(re.sub(r"\D", "", os.environ.get("SLURM_JOB_ID", "")) or 0)
        port = os.environ.get("MASTER_PORT") or str(20000 + job % 20000 if job else 29500)
        os.environ.update(dict(zip(_RANK, (rank, size, local_rank, address, port), strict=True)))
        if here:
            os.environ["LOCAL_WORLD_SIZE"] = here[0]
        return


def _first_host() -> str:
    """Return the first machine of a Slurm step, whose machines are listed in the form node[01-04,7],other."""
    first = re.match(r"([^\[,]+)(?:\[(\d+))?", os.environ.get("SLURM_STEP_NODELIST", ""))
    return f"{first[1]}{first[2] or ''}" if first else ""
