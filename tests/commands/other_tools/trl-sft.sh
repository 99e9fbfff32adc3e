# Full training
python trl/scripts/sft.py \
    --model_name_or_path example/Base-0.5B \
    --dataset_name example/chats \
    --learning_rate 2.0e-5 \
    --num_train_epochs 1 \
    --packing \
    --per_device_train_batch_size 2 \
    --gradient_accumulation_steps 8 \
    --gradient_checkpointing \
    --eos_token '<|im_end|>' \
    --eval_strategy steps \
    --eval_steps 100 \
    --output_dir Base-0.5B-SFT \
    --push_to_hub
