NPROC_PER_NODE=4 swift rlhf --rlhf_type grpo --model X --dataset 'a/b#100' 'c/d' --top_k -1 --val_dataset e f --hub_token hf_abcdefghijklmnopqrstuvwxyz0123456789 2>&1 | tee log
