"""Two ranks on one GPU: whether rollouts, losses, checkpoints and the end of a broken run are right there.

    python benchmarks/gpu_ranks.py FOLDER --json FILE [--toy]

NCCL refuses two ranks on a GPU unless it takes them for two machines. So each has its own NCCL_HOSTID, and they talk
over the loopback, which proves that a run is right, and says nothing of its speed. The letters are trained for three
steps in bfloat16 with a reference: by one rank, then by two at either stage of ZeRO, whose optimizer states leave the
GPU between steps. Of two, one is killed in the third step, while the other waits for it; measured is how long that one
takes to end. The run is resumed, and its completions and losses are compared with those of one rank: in bfloat16 they
are the same in the first step, and later ones are not far apart. With `--toy` the ranks are on the CPU, where they talk
through gloo.
"""

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from machine import parser_of, save

from hybrid_grpo.run.local_ranks import free_port

ROOT = Path(__file__).parent.parent
STEPS, GONE_S, MOST_S = 3, 60.0, 110.0
"""Steps of a run; seconds within which it has to end after a rank has died, and in all."""
LOOPBACK = {"NCCL_P2P_DISABLE": "1", "NCCL_SHM_DISABLE": "1", "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "lo"}
ON_CPU = {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def scattered(completion_ids: list[list[int]], trainer_state: Any) -> list[float]:
    """A reward that differs within a group, and takes a minute in the last step of the rank that is to die."""
    if trainer_state.global_step + 1 == STEPS and os.environ["DIES"] == os.environ["RANK"]:
        time.sleep(60)
    return [sum(ids) % 97 / 96 for ids in completion_ids]


class Runs:
    """Runs of the letters in a folder."""

    def __init__(self, folder: Path, toy: bool) -> None:
        self.folder, self.environment = folder, {**os.environ, **(ON_CPU if toy else LOOPBACK)}
        self.gone_s, self.most_s = (10 * GONE_S, 10 * MOST_S) if toy else (GONE_S, MOST_S)
        shutil.rmtree(folder, ignore_errors=True)  # of another commit
        task = folder / "task"
        subprocess.run([sys.executable, ROOT / "training_scripts/letters_task.py", task], check=True)
        settings = {
            **{"policy.model": task / "model", "policy.dtype": "bfloat16", "policy.lr": "1e-3", "grpo.beta": "0.02"},
            **{"data.path": task / "train.jsonl", "run.dir": folder, "run.steps": STEPS, "run.resume": "auto"},
            **{"rollout.prompts_per_step": 8, "rollout.num_generations": 8, "rollout.max_completion_tokens": 8},
            **{"rollout.cache_gb": 1, "checkpoint.every": 1, "log.rollouts_every": 1, "log.wandb": "disabled"},
            "rewards": f"[{{function: '{__file__}:scattered'}}]",
        }
        self.settings = [part for name, value in settings.items() for part in (f"--{name}", str(value))]

    def run(self, name: str, world: int, stage: int, dies: str = "") -> tuple[list[int], float]:
        """The statuses of the ranks, and the seconds from the first end of one to the last."""
        command = [sys.executable, "-m", "hybrid_grpo", "train", *self.settings]
        command += ["--run.name", name, "--engine.zero_stage", str(stage)]
        command += ["--engine.sequence_parallel", str(1 + (name == "split"))]
        command += ["--engine.offload_optimizer", "between_steps" if world > 1 else "false"]
        shared = {"WORLD_SIZE": str(world), "LOCAL_SIZE": str(world), "CROSS_SIZE": "1", "DIES": dies}
        shared |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
        ranks, ends = [], dict[int, float]()
        with (self.folder / f"{name}.log").open("a") as log:
            for rank in map(str, range(world)):
                own = {"RANK": rank, "LOCAL_RANK": rank, "NCCL_HOSTID": f"rank{rank}"}
                environment = {**self.environment, **shared, **own}
                ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT))
        end = time.monotonic() + self.most_s
        while dies and len(self.metrics(name)) < STEPS - 1 and time.monotonic() < end and ranks[0].poll() is None:
            time.sleep(1)
        for rank in map(int, dies):
            ranks[rank].kill()
        while len(ends) < world and (now := time.monotonic()) < end:
            ends |= {rank: now for rank, process in enumerate(ranks) if rank not in ends and process.poll() is not None}
            end = min(end, min(ends.values(), default=end) + self.gone_s)
            time.sleep(0.05)
        for process in ranks:
            process.kill()
        return [process.wait() for process in ranks], max(ends.values(), default=0.0) - min(ends.values(), default=0.0)

    def refuse(self, name: str, failed: bool) -> None:
        """End the program with the last words of a run that failed."""
        said = [line.strip() for line in (self.folder / f"{name}.log").read_text().splitlines() if line.strip()]
        if failed:
            sys.exit(f"{name}: {next((line for line in reversed(said) if 'NCCL' in line), said[-1])}")

    def finished(self, name: str, world: int, stage: int) -> dict[str, Any]:
        """Losses and completions of a run, which is started or resumed."""
        self.refuse(name, any(self.run(name, world, stage)[0]))
        sampled: dict[str, str] = {}
        for file in sorted((self.folder / name / "rollouts").glob("step_*.jsonl")):
            for row in map(json.loads, file.read_text().splitlines()):
                sampled[f"{file.stem} {row['prompt_id']} {row['sample']}"] = row["completion"]
        return {"losses": {row["step"]: row["policy/loss"] for row in self.metrics(name)}, "completions": sampled}

    def metrics(self, name: str) -> list[dict[str, Any]]:
        file = self.folder / name / "metrics.jsonl"
        return [json.loads(line) for line in file.read_text().split("\n")[:-1]] if file.exists() else []


def two(runs: Runs, name: str, stage: int, alone: dict[str, Any]) -> dict[str, Any]:
    """Two ranks at a stage of ZeRO, in `split` with every row on both, broken and resumed, beside one rank."""
    statuses, gone_s = runs.run(name, 2, stage, dies="1")
    found = {"statuses": statuses, "gone_s": round(gone_s, 1), "steps_before": len(runs.metrics(name))}
    runs.refuse(name, not found["steps_before"])
    whole = runs.finished(name, 2, stage)
    assert whole["losses"].keys() == alone["losses"].keys(), f"{name}: steps {[*whole['losses']]}"
    assert whole["completions"].keys() == alone["completions"].keys(), f"{name}: other prompts than on one rank"
    for steps, last in (("first step", 1), ("all steps", STEPS)):
        apart = [abs(loss - alone["losses"][step]) for step, loss in whole["losses"].items() if step <= last]
        texts = {key: text for key, text in whole["completions"].items() if int(key[5:11]) <= last}
        same = [text == alone["completions"][key] for key, text in texts.items()]
        found |= {f"same, {steps}": sum(same) / len(same), f"losses apart, {steps}": max(apart)}
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--toy", action="store_true", help="on the CPU")
    given = parser.parse_args()
    runs, found = Runs(given.folder.resolve(), given.toy), dict[str, Any]()
    try:
        alone, failed = runs.finished("alone", 1, 2), ""
    except SystemExit as error:
        save(given.json, {"alone": {"failed": str(error)}})
        raise
    for name, stage in (("zero3", 3), ("split", 2)):
        try:
            found[name] = two(runs, name, stage, alone)
        except (SystemExit, AssertionError) as error:
            failed = str(error)
            found[name] = {"failed": failed}
        print(f"{name}: {found[name]}", flush=True)
        save(given.json, found)
    sys.exit(failed or 0)


if __name__ == "__main__":
    main()
