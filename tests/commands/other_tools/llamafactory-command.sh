#!/bin/bash
set -x
MODEL_PATH=example/Instruct-8B

torchrun --nproc_per_node 2 --nnodes 2 src/train.py \
    --model_name_or_path ${MODEL_PATH} \
    --trust_remote_code \
    --stage sft \
    --do_train \
    --finetuning_type lora \
    --lora_rank 8 \
    --lora_target all \
    --dataset who_am_i,more \
    --template llama3 \
    --cutoff_len 2048 \
    --overwrite_cache \
    --output_dir saves/command \
    --save_only_model false \
    --report_to none \
    --per_device_train_batch_size 1 \
    --gradient_accumulation_steps 8 \
    --learning_rate 1e-4 \
    --num_train_epochs 3.0 \
    --lr_scheduler_type cosine \
    --warmup_ratio 0.1 \
    --bf16
