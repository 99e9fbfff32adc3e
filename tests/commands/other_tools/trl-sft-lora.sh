accelerate launch --config_file examples/accelerate_configs/multi_gpu.yaml --num_processes 4 trl/scripts/sft.py \
    --model_name_or_path example/Base-0.5B \
    --dataset_name example/chats --dataset_config german \
    --learning_rate 2.0e-4 --num_train_epochs 1 --packing \
    --per_device_train_batch_size 2 --gradient_accumulation_steps 8 \
    --eval_strategy steps --eval_steps 100 \
    --use_peft --lora_r 32 --lora_alpha 16 --lora_target_modules q_proj v_proj \
    --assistant_only_loss True --no_remove_unused_columns \
    --output_dir Base-0.5B-SFT
