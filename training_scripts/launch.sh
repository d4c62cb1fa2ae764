# Sourced by the recipes: `launch COMMAND [settings]` runs hybrid_grpo on every GPU found, else on two CPU ranks.
# Under several nodes, give the DeepSpeed launcher's own options in LAUNCHER, e.g. LAUNCHER="--hostfile hosts".

launch() {
    local gpus port
    # A free port, so that two runs on one machine do not meet at DeepSpeed's default.
    read -r gpus port < <(python -c '
import socket, torch
with socket.create_server(("127.0.0.1", 0)) as probe:
    print(torch.cuda.device_count(), probe.getsockname()[1])')
    if [ "$gpus" -gt 0 ]; then
        # shellcheck disable=SC2086
        PYTORCH_CUDA_ALLOC_CONF=${PYTORCH_CUDA_ALLOC_CONF:-expandable_segments:True} \
            deepspeed --quiet ${LAUNCHER:---num_gpus "$gpus" --master_port "$port"} --no_local_rank --module hybrid_grpo "$@"
    else
        local cores
        cores=$(getconf _NPROCESSORS_ONLN)
        DS_ACCELERATOR=cpu OMP_NUM_THREADS=${OMP_NUM_THREADS:-$(((cores + 1) / 2))} \
            deepspeed --quiet --num_accelerators 2 --master_port "$port" --no_local_rank --module hybrid_grpo "$@"
    fi
}
