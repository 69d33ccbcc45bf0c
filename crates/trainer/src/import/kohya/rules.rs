//! Flags and data set keys that no function asks for.

use super::super::notes::{KeyRule, differs, no_effect, refused};

/// Of both trainers.
pub(super) const BOTH: &[KeyRule] = &[
    no_effect(
        "gradient_checkpointing cpu_offload_checkpointing gradient_checkpointing_cpu_offload blocks_to_swap \
         use_pinned_memory_for_block_swap block_swap_* img_in_txt_in_offloading lowram highvram deepspeed zero_stage \
         zero3_* offload_* mem_eff_save disable_mmap_load_safetensors disable_numpy_memmap",
        "the plan chooses gradient checkpointing and block swap; the result is the same",
    ),
    no_effect(
        "cache_latents cache_latents_to_disk cache_text_encoder_outputs cache_text_encoder_outputs_to_disk \
         skip_cache_check vae_batch_size text_encoder_batch_size ~cache_directory ~cache_info vae_dtype vae_tiling \
         vae_chunk_size vae_spatial_tile_sample_min_size no_half_vae tokenizer_cache_dir",
        "images and captions are always encoded once, into the run's cache",
    ),
    no_effect(
        "sdpa xformers mem_eff_attn flash_attn flash3 sage_attn split_attn split_mode torch_compile compile* dynamo_* \
         cuda_allow_tf32 cuda_cudnn_benchmark fp16_master_weights_and_gradients",
        "which kernels compute it; the result is the same",
    ),
    no_effect(
        "max_data_loader_n_workers persistent_data_loader_workers ddp_* ~debug_dataset output_config dataset_class \
         show_timesteps",
        "how the program runs; the result is the same",
    ),
    no_effect(
        "logging_dir log_with log_prefix log_tracker_name log_tracker_config log_config wandb_* no_metadata \
         training_comment metadata_*",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "save_precision save_model_as use_safetensors save_state save_state_on_train_end save_last_n_epochs_state \
         save_last_n_steps_state save_n_epoch_ratio huggingface_* save_state_to_huggingface resume_from_huggingface \
         async_upload",
        "checkpoints always hold the whole state; `hearth export` writes other formats; \
         nothing is uploaded",
    ),
    no_effect(
        "sample_sampler sample_at_first",
        "samples are drawn as the model's makers do, also at step 0",
    ),
    no_effect(
        "max_token_length t5xxl_max_token_length t5xxl_device t5xxl_dtype text_encoder_dtype \
         dit_dtype",
        "as the model's makers have it",
    ),
    no_effect("caption_extention", "kohya's misspelt key, which it corrects"),
    no_effect(
        "network_args.conv_dim network_args.conv_alpha network_args.verbose",
        "there are no such layers",
    ),
    no_effect(
        "logit_mean logit_std mode_scale lr_decay_steps lr_scheduler_timescale \
         lr_scheduler_min_lr_ratio sigmoid_scale discrete_flow_shift num_timestep_buckets",
        "another setting decides, so that it does nothing",
    ),
    no_effect("optimizer_args.warmup_init", "for `relative_step`"),
    differs("optimizer_args.*", "hearth's optimizer has no such setting"),
    differs("lr_scheduler_type lr_scheduler_args.*", "hearth has no such schedule"),
    differs("loss_type", "the loss is the mean squared error").unless(&["l2"]),
    no_effect("huber_*", "for `loss_type = huber`"),
    differs(
        "scale_weight_norms network_args.rank_dropout network_args.module_dropout \
         network_args.loraplus* network_args.ggpo_* network_args.use_tucker network_args.use_scalar \
         network_args.bypass_mode network_args.preset network_args.train_norm",
        "hearth's LoRA has rank, alpha and dropout",
    ),
    refused(
        "network_weights dim_from_weights base_weights base_weights_multiplier",
        "hearth begins with a new adapter; `hearth export` merges one into the base",
    ),
    refused(
        "network_args.exclude_patterns network_args.include_patterns network_args.network_reg_*",
        "layers are chosen by name: write adapter.targets or adapter.pattern into the job",
    ),
    refused(
        "resume initial_epoch initial_step skip_until_initial_step",
        "a run of another trainer cannot be resumed",
    ),
    differs("lr_scheduler_power lr_scheduler_num_cycles", "schedules run once over the whole job")
        .unless(&["1", "1.0"]),
];

/// Of sd-scripts.
pub(super) const SD_SCRIPTS: &[KeyRule] = &[
    differs(
        "~min_bucket_reso ~max_bucket_reso",
        "sides of buckets have no limits of their own, their area is that of data.resolution",
    ),
    differs("~resize_interpolation", "images are scaled as hearth does it"),
    differs("~color_aug ~face_crop_aug_range", "hearth flips sideways and crops alone"),
    differs(
        "~caption_suffix ~secondary_separator ~keep_tokens_separator",
        "captions are used as they are",
    ),
    differs("~caption_separator", "tags are separated by commas").unless(&[",", ""]),
    no_effect("~keep_tokens", "for `shuffle_caption`"),
    differs(
        "~caption_dropout_every_n_epochs ~caption_tag_dropout_rate ~token_warmup_step",
        "hearth drops whole captions by chance alone",
    ),
    no_effect(
        "~token_warmup_min ~validation_seed ~custom_attributes max_validation_steps",
        "nothing here depends on it",
    ),
    no_effect("~prior_loss_weight", "for regularisation images"),
    differs("~network_multiplier", "the adapter has the same weight for all images")
        .unless(&["1", "1.0"]),
    differs(
        "~class_tokens",
        "an image without a caption is trained without one; in a folder called `10_sks dog` \
         it is `sks dog`",
    ),
    refused(
        "~metadata_file in_json",
        "captions stand beside images, or in metadata.jsonl with `file_name` and `text`",
    ),
    refused("v2 v_parameterization", "hearth trains SD3 and FLUX.1 of those that sd-scripts has"),
    refused(
        "network_args.*_dim network_args.img_attn_dim network_args.txt_attn_dim \
         network_args.img_mlp_dim network_args.txt_mlp_dim network_args.img_mod_dim \
         network_args.txt_mod_dim network_args.single_dim network_args.single_mod_dim \
         network_args.in_dims",
        "ranks by layer: write adapter.pattern into the job",
    ),
    refused(
        "network_args.train_double_block_indices network_args.train_single_block_indices",
        "blocks by number: write adapter.targets into the job",
    )
    .unless(&["all"]),
    refused(
        "network_train_text_encoder_only network_args.train_t5xxl controlnet_model_name_or_path",
        "hearth trains a transformer, and CLIP with it; not T5 nor ControlNets",
    ),
    no_effect("text_encoder_lr", "text encoders are not trained here"),
    differs(
        "apply_t5_attn_mask apply_lg_attn_mask",
        "text embeddings have no attention mask, as in diffusers",
    ),
    differs(
        "noise_offset noise_offset_random_strength multires_noise_iterations ip_noise_gamma \
         ip_noise_gamma_random_strength adaptive_noise_scale zero_terminal_snr \
         weighted_captions clip_skip",
        "hearth has no such change of noise or captions",
    ),
    no_effect(
        "min_snr_gamma debiased_estimation_loss scale_v_pred_loss_like_noise_pred v_pred_like_loss",
        "for models without flow matching",
    ),
    no_effect("multires_noise_discount", "for `multires_noise_iterations`"),
    differs(
        "clip_l_dropout_rate clip_g_dropout_rate t5_dropout_rate pos_emb_random_crop_rate \
         enable_scaled_pos_embed",
        "hearth drops whole captions alone",
    ),
    differs("full_bf16 full_fp16", "the adapter is trained in f32"),
    no_effect(
        "validate_every_n_steps validate_every_n_epochs",
        "held-out loss is measured every train.validate_every steps",
    ),
    no_effect("dataset_repeats", "`num_repeats` of the data set"),
    refused("model_type", "hearth trains FLUX.1, not Chroma").unless(&["flux"]),
    no_effect("save_clip save_t5xxl", "text encoders have an adapter alone"),
];

/// Of musubi-tuner.
pub(super) const MUSUBI: &[KeyRule] = &[
    no_effect(
        "task dit_in_channels offload_dit_during_sampling no_vae_load scheduler_scale num_layers",
        "the checkpoint tells it",
    ),
    no_effect("~fp_latent_window_size ~fp_1f_* ~max_frames", "for other models"),
    differs(
        "~no_resize_control ~flux_kontext_no_resize_control ~qwen_image_edit_no_resize_control \
         ~flux_2_no_resize_control",
        "references are scaled to data.reference_resolution",
    ),
    differs("~frame_stride ~source_fps", "clips are resampled to data.fps"),
    no_effect("~frame_sample", "for `frame_extraction = uniform`"),
    refused("~multiple_target remove_first_image_from_target", "hearth has no layered images"),
    refused(
        "override_dit i2v_mode",
        "hearth trains text to image and text to video of Kandinsky 5",
    )
    .unless(&["first"]),
    differs("force_nabla_attention nabla_*", "attention is computed in full"),
    no_effect("guidance_scale", "the model has no guidance embedding"),
    no_effect("use_32bit_attention", "which kernels compute it"),
    differs("full_bf16", "the adapter is trained in f32"),
    no_effect("edit edit_plus", "the checkpoint and the reference images tell it"),
];
