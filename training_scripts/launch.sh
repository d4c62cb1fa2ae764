# Sourced by the recipes: `launch COMMAND [settings]` runs hybrid_grpo on the GPUs that CUDA_VISIBLE_DEVICES names, else
# on $GPUS of them, else on every GPU found; without one on two CPU ranks.
# Under several nodes, give the DeepSpeed launcher's own options in LAUNCHER, e.g. LAUNCHER="--hostfile hosts".

launch() {
    local gpus port default
    # A task of srun, mpirun or torchrun is one rank already: it starts no launcher of its own.
    if [ "${SLURM_STEP_NUM_TASKS:-${OMPI_COMM_WORLD_SIZE:-${WORLD_SIZE:-1}}}" -gt 1 ]; then
        python -m hybrid_grpo "$@"
        return
    fi
    # A free port, so that two runs on one machine do not meet at DeepSpeed's default.
    read -r gpus port < <(python -c '
import socket, torch
with socket.create_server(("127.0.0.1", 0)) as probe:
    print(torch.cuda.device_count(), probe.getsockname()[1])')
    if [ "$gpus" -eq 0 ] && [ -z "${DS_ACCELERATOR:-}" ] && [ "${CUDA_VISIBLE_DEVICES-all}" != "" ] &&
        compgen -G "/dev/nvidia[0-9]*" >/dev/null; then
        echo "launch: this machine has GPUs that torch cannot use: update the driver or install another torch" \
            "(TORCH_VERSION); DS_ACCELERATOR=cpu trains on the CPU" >&2
        return 1
    fi
    if [ "$gpus" -gt 0 ]; then
        default="--num_gpus ${GPUS:-$gpus} --master_port $port"
        # Given a number, the launcher takes the machine's first GPUs, whichever are visible.
        if [ -n "${CUDA_VISIBLE_DEVICES:-}" ]; then default="--master_port $port"; fi
        # shellcheck disable=SC2086
        PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} \
            deepspeed --quiet ${LAUNCHER:-$default} --no_local_rank --module hybrid_grpo "$@"
    else
        local cores
        cores=$(getconf _NPROCESSORS_ONLN)
        DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + 1) / 2))} \
            deepspeed --quiet ${LAUNCHER:---num_accelerators 2 --master_port "$port"} --no_local_rank --module hybrid_grpo "$@"
    fi
}
