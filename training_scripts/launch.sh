# Sourced by the recipes: `launch COMMAND [settings]` runs hybrid_grpo on the first $GPUS of the GPUs that are visible
# (CUDA_VISIBLE_DEVICES), else on all of them; without a GPU on $RANKS (2) CPU ranks.
# If ROWS, the rows of a step, is set and GPUS is not, it uses the largest number of GPUs that divides it.
# For several nodes, put the DeepSpeed launcher's own options into LAUNCHER, e.g. LAUNCHER="--hostfile hosts".
# `resumes [settings]` succeeds if the settings resume a run; `set_aside FOLDER...` and `begin RUN [settings]` make room
# for new runs.
. training_scripts/setup.sh

launch() {
    local gpus=0 port default
    # A task of srun, mpirun or torchrun is already one rank, so no launcher is started.
    if [ "${SLURM_STEP_NUM_TASKS:-${OMPI_COMM_WORLD_SIZE:-${WORLD_SIZE:-1}}}" -gt 1 ]; then
        python -m hybrid_grpo "$@"
        return
    fi
    # torch takes seconds to import, so it is asked only where there may be a GPU.
    if gpu_devices; then
        gpus=$(python -c 'import torch; print(torch.cuda.device_count())')
    fi
    if [ "$gpus" -eq 0 ] && [ -z "${DS_ACCELERATOR:-}" ] && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ] &&
        compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
        echo "launch: this machine has GPUs that torch cannot use: update the driver, or install a torch for it (for" \
            "CUDA 12 TORCH_INDEX=https://download.pytorch.org/whl/cu126); DS_ACCELERATOR=cpu trains on the CPU" >&2
        return 1
    fi
    if [ "$gpus" -gt 0 ]; then
        # torch reads it when it is imported.
        if [ -z "${PYTORCH_CUDA_ALLOC_CONF:-}${PYTORCH_ALLOC_CONF:-}" ]; then
            export PYTORCH_ALLOC_CONF=expandable_segments:True
        fi
        local visible=${CUDA_VISIBLE_DEVICES:-}
        # A free port, since two runs on one machine would collide on DeepSpeed's default.
        port=$(python -c 'import socket; print(socket.create_server(("127.0.0.1", 0)).getsockname()[1])')
        if [ -z "${GPUS:-}" ] || [ -n "${LAUNCHER:-}" ]; then
            while [ $((${ROWS:-0} % gpus)) -ne 0 ]; do gpus=$((gpus - 1)); done
        elif [[ $GPUS =~ ^[1-9][0-9]{0,3}$ && $GPUS -le $gpus ]]; then
            gpus=$GPUS
        else
            echo "launch: GPUS $GPUS must be a whole number of 1 to $gpus, the number of visible GPUs: change it, or" \
                "make more GPUs visible (CUDA_VISIBLE_DEVICES)" >&2
            return 2
        fi
        default="--num_gpus $gpus --master_port $port"
        # With --num_gpus the launcher takes the machine's first GPUs and ignores which ones are visible.
        if [ -n "$visible" ]; then
            default="--master_port $port"
            visible=$(cut -d, -f "1-$gpus" <<<"$visible")
        fi
        # shellcheck disable=SC2086
        stoppable ${visible:+env "CUDA_VISIBLE_DEVICES=$visible"} deepspeed --quiet ${LAUNCHER:-$default} --no_local_rank --module hybrid_grpo "$@"
    else
        local cores ranks=${RANKS:-2}
        local launcher=(python -m hybrid_grpo.run.local_ranks "$ranks")
        cores=$(getconf _NPROCESSORS_ONLN)
        if [ -n "${LAUNCHER:-}" ]; then
            # shellcheck disable=SC2206
            launcher=(deepspeed --quiet $LAUNCHER --no_local_rank --module hybrid_grpo)
        fi
        DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + ranks - 1) / ranks))} stoppable "${launcher[@]}" "$@"
    fi
}

# Run the launcher so that SIGTERM, SIGUSR1 and Ctrl-C stop the ranks, which save the run, and return the run's status:
# the launcher itself neither forwards signals nor returns the status of its ranks. A second Ctrl-C kills the ranks.
stoppable() {
    local told launcher status=0 asked=0 waited
    told=$(mktemp)
    HYBRID_GRPO_STATUS=$told "$@" <&0 &
    launcher=$!
    trap 'asked=$((asked + 1)); signal_ranks TERM' TERM
    trap 'asked=$((asked + 1)); signal_ranks USR1' USR1
    trap 'asked=$((asked + 1)); if [ "$asked" -gt 1 ]; then signal_ranks KILL; else signal_ranks TERM; fi' INT
    while kill -0 "$launcher" 2>/dev/null; do
        status=0
        wait "$launcher" || status=$?
    done
    # If the launcher was killed, the ranks take a moment to save the run.
    for ((waited = 0; waited < 150; waited++)); do
        if [ "$(cat "$told")" != running ]; then break; fi
        sleep 0.1
    done
    trap - TERM USR1 INT
    case "$(cat "$told")" in
    75) status=75 ;;
    running) status=$((status ? status : 1)) ;;
    "") if [ "$asked" -gt 0 ]; then status=75; fi ;;
    esac
    rm -f "$told"
    return "$status"
}

signal_ranks() { # or stop the launcher, if no rank has started yet
    python -c '
import signal, sys, psutil
launcher = psutil.Process(int(sys.argv[1]))
local = [child for child in launcher.children() if "deepspeed.launcher.launch" in child.cmdline()]
ranks = [rank for parent in local or [launcher] for rank in parent.children()]
for process in ranks:
    process.send_signal(signal.Signals["SIG" + sys.argv[2]])
for process in () if ranks else [*local, launcher]:
    process.terminate()' "$launcher" "$1" 2>/dev/null || true
}

setting() { # NAME DEFAULT [settings]: the value of a setting
    local name=--$1 value=$2
    shift 2
    while [ $# -gt 0 ]; do
        case "$1" in
        "$name="*) value=${1#*=} ;;
        "$name") value=${2:-} ;;
        esac
        shift
    done
    echo "$value"
}

resumes() {
    [ "$(setting run.resume never "$@")" != never ]
}

begin() { # RUN [settings]: set $runs, where results go, and make room for a run and its warm-up unless it resumes
    local recipe=$1 name
    shift
    runs=$(setting run.dir "${RUNS:-runs}" "$@") name=$(setting run.name "$recipe" "$@")
    if resumes "$@"; then return; fi
    # A run of another name starts from the warm-up that is there.
    if [ "$name" = "$recipe" ] && [[ " $*" != *" --policy.model"* ]]; then
        set_aside "$runs/$recipe-task" "$runs/$recipe-sft" "$runs/$recipe"
    else
        set_aside "$runs/$name"
    fi
}

set_aside() { # keep existing folders under another name; nothing is moved if a run in one of them is under way
    local folder lock
    for folder in "$@"; do
        for lock in "$folder"/.lock "$folder"/*/.lock; do
            if [ -e "$lock" ]; then python -m hybrid_grpo.records.lock "${lock%/.lock}"; fi
        done
    done
    for folder in "$@"; do
        if [ -e "$folder" ]; then mv "$folder" "$folder.$(date +%Y%m%d-%H%M%S)"; fi
    done
}
