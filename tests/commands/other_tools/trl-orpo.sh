trl orpo --model_name_or_path=example/Instruct-0.5B --dataset_name example/pairs --max_steps 500 --beta 0.25 \
    --per_device_train_batch_size 4 --gradient_accumulation_steps 1 --optim adamw_bnb_8bit --max_length 1536 \
    --max_prompt_length 128 --warmup_ratio 0.1 --report_to tensorboard trackio --use_peft --lora_target_modules all-linear
