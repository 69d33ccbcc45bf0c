#!/usr/bin/env bash
# LoRA of FLUX.1 dev, in 24 GB
MODELS=models
accelerate launch --mixed_precision bf16 --num_cpu_threads_per_process 1 flux_train_network.py \
  --pretrained_model_name_or_path $MODELS/flux1-dev.safetensors --clip_l $MODELS/clip_l.safetensors \
  --t5xxl $MODELS/t5xxl_fp16.safetensors --ae $MODELS/ae.safetensors \
  --cache_latents_to_disk --save_model_as safetensors --sdpa --persistent_data_loader_workers \
  --max_data_loader_n_workers 2 --seed 42 --gradient_checkpointing --mixed_precision bf16 --save_precision bf16 \
  --network_module networks.lora_flux --network_dim 16 --network_train_unet_only \
  --optimizer_type adamw8bit --optimizer_args "weight_decay=0.05" "betas=(0.9,0.95)" \
  --learning_rate 1e-4 --lr_scheduler cosine_with_restarts --lr_warmup_steps 0.05 \
  --cache_text_encoder_outputs --fp8_base --max_train_steps 2000 --save_every_n_steps 500 \
  --dataset_config dataset.toml --output_dir out/fox --output_name fox \
  --timestep_sampling shift --discrete_flow_shift 3.1582 --model_prediction_type raw --guidance_scale 1.0 \
  --sample_prompts prompts.txt --sample_every_n_steps 500 --loss_type l2
