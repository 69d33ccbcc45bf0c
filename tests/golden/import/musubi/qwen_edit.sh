accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/qwen_image_train_network.py \
    --dit models/qwen_image_edit_2509_bf16.safetensors --vae models/qwen_vae.safetensors \
    --text_encoder models/qwen_2.5_vl_7b.safetensors --model_version edit-2509 \
    --dataset_config edit.toml --sdpa --mixed_precision bf16 \
    --timestep_sampling shift --weighting_scheme none --discrete_flow_shift 2.2 \
    --optimizer_type adamw8bit --learning_rate 5e-5 --gradient_checkpointing --fp8_base --fp8_scaled --fp8_vl \
    --network_module networks.lora_qwen_image --network_dim 16 --blocks_to_swap 16 \
    --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 --output_dir out --output_name edit
