accelerate launch --num_cpu_threads_per_process 1 --mixed_precision bf16 src/musubi_tuner/zimage_train_network.py \
    --dit models/z_image_turbo_bf16.safetensors --vae models/ae.safetensors --text_encoder models/qwen_3_4b.safetensors \
    --base_weights models/zimage_turbo_training_adapter_v2.safetensors \
    --dataset_config fox.toml --sdpa --mixed_precision bf16 --fp8_base --fp8_scaled --fp8_llm \
    --timestep_sampling shift --weighting_scheme none --discrete_flow_shift 2.0 \
    --optimizer_type adamw8bit --learning_rate 1e-4 --gradient_checkpointing \
    --max_data_loader_n_workers 2 --persistent_data_loader_workers \
    --network_module networks.lora_zimage --network_dim 32 \
    --max_train_epochs 16 --save_every_n_epochs 1 --seed 42 \
    --sample_prompts fox.txt --sample_every_n_epochs 2 --output_dir out --output_name fox
