//! Keys that no function asks for.

use super::super::family::TRAINED;
use super::super::notes::{KeyRule, differs, no_effect, refused};

pub(super) const RULES: &[KeyRule] = &[
    no_effect("job type meta.name meta.version", "names that nothing depends on"),
    no_effect(
        "device model.te_device model.vae_device",
        "hearth uses the GPU it finds; --device overrides",
    ),
    no_effect(
        "performance_log_every sqlite_db_path log_dir logging.* torch_profiler \
         train.max_loss_debug",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "train.gradient_checkpointing model.low_vram model.layer_offloading* model.auto_memory \
         network.layer_offloading model.split_model* train.do_paramiter_swapping train.paramiter_swapping_factor",
        "the plan chooses gradient checkpointing and block swap; the result is the same",
    ),
    no_effect(
        "datasets[].cache_* train.cache_text_embeddings train.unload_text_encoder datasets[].num_workers \
         datasets[].prefetch_factor datasets[].load_image_when_caching_latents datasets[].fast_image_size \
         datasets[].debug",
        "images and captions are always encoded once, and the encoders unloaded",
    ),
    no_effect(
        "train.attention_backend train.sdp train.xformers model.attn_masking model.compile* model.block_compile \
         model.cache_size_limit",
        "which kernels compute it; the result is the same",
    ),
    no_effect(
        "save.dtype save.save_format save.push_to_hub save.hf_*",
        "`hearth export` writes other formats; nothing is uploaded",
    ),
    no_effect("train.noise_scheduler sample.sampler", "flow matching, as the model was trained"),
    no_effect(
        "train.skip_first_sample train.force_first_sample sample.sample_start_step",
        "samples of step 0 are drawn if sample.every is set",
    ),
    no_effect(
        "sample.walk_seed sample.format sample.network_multiplier \
         sample.samples[].network_multiplier sample.adapter_conditioning_scale",
        "samples alone depend on it; the next prompt has the next seed",
    ),
    no_effect(
        "network.conv network.conv_alpha network.transformer_only network.lokr* \
         network.old_lokr_format network.split_multistage_loras",
        "there are no such layers in these models",
    ),
    no_effect(
        "train.train_unet train.train_refiner train.num_train_timesteps model.dtype \
         model.vae_dtype model.te_dtype model.model_kwargs model.model_kwargs.* model.use_flux_cfg \
         train.start_step",
        "what hearth does",
    ),
    no_effect("datasets[].type datasets[].replay_transforms", "as hearth does it"),
    no_effect(
        "datasets[].do_i2v datasets[].do_audio datasets[].fps datasets[].shrink_video_to_frames datasets[].auto_frame_count \
         datasets[].trim_auto_frame_count_tail sample.num_frames sample.fps",
        "for videos",
    ),
    differs("datasets[].bucket_tolerance", "sides are multiples of data.bucket_step, 64")
        .unless(&["64"]),
    differs("datasets[].buckets", "images keep their aspect ratio").unless(&["true"]),
    differs(
        "datasets[].square_crop datasets[].random_scale datasets[].flip_y \
         datasets[].augmentations datasets[].augments datasets[].shuffle_augmentations",
        "hearth scales, crops and flips sideways alone",
    ),
    differs("datasets[].scale", "images are scaled to data.resolution").unless(&["1", "1.0"]),
    differs("datasets[].default_caption", "an image without a caption is trained without one"),
    differs(
        "datasets[].token_dropout_rate datasets[].random_triggers* datasets[].replacements \
         datasets[].use_short_captions train.short_and_long_captions*",
        "hearth drops whole captions alone",
    ),
    differs(
        "datasets[].full_size_control_images model.model_kwargs.match_target_res",
        "references are scaled to data.reference_resolution",
    )
    .unless(&["true"]),
    differs("datasets[].network_weight", "the adapter has the same weight for all images")
        .unless(&["1", "1.0"]),
    no_effect(
        "train.content_or_style_reg",
        "ai-toolkit does not read it: regularisation images are drawn as content_or_style says",
    ),
    differs("train.next_sample_timesteps", "there is no such distribution of timesteps"),
    differs(
        "train.noise_offset train.dynamic_noise_offset train.snr_gamma train.min_snr_gamma \
         train.weight_jitter train.random_noise_multiplier train.do_signal* \
         train.do_batch_noise_correction train.force_consistent_noise \
         train.blended_blur_noise train.match_noise_norm train.adaptive_scaling_factor \
         train.prompt_dropout_prob train.prompt_saturation_chance train.do_random_cfg \
         train.standardize_* train.correct_pred_norm train.max_loss",
        "hearth has no such change of noise or loss",
    ),
    differs("train.loss_type", "hearth has no such loss; it is the mean squared error")
        .unless(&["mse"]),
    differs("train.loss_target", "the loss is that of the velocity").unless(&["noise"]),
    differs("train.optimizer_params.*", "hearth's optimizer has no such setting"),
    differs("train.lr_scheduler_params.*", "schedules run over the whole job"),
    differs(
        "train.refiner_lr train.embedding_lr train.adapter_lr",
        "one learning rate for all that is trained",
    ),
    no_effect("train.text_encoder_lr", "text encoders are not trained here"),
    differs(
        "train.diff_output_preservation* train.blank_prompt_preservation* \
         datasets[].diff_output_preservation* train.inverted_mask_prior* \
         train.do_differential_guidance train.differential_guidance_scale \
         train.do_guidance_loss* train.do_cfg train.do_prior_divergence \
         train.switch_boundary_every",
        "hearth has no such second pass of the model",
    ),
    differs("train.ema_config.*", "hearth's EMA has a decay alone"),
    differs(
        "sample.guidance_rescale sample.do_cfg_norm sample.samples[].do_cfg_norm \
         sample.refiner_start_at sample.extra_values",
        "samples alone differ",
    ),
    refused(
        "datasets[].inpaint_path datasets[].invert_mask",
        "hearth has neither inpainting nor masks that are black where they count",
    ),
    refused(
        "datasets[].num_frames",
        "hearth trains videos with Kandinsky 5, which ai-toolkit does not have",
    )
    .unless(&["1"]),
    refused(
        "datasets[].control_from_same_folder datasets[].controls datasets[].clip_image_path",
        "reference images are in folders of their own (data.references)",
    ),
    refused(
        "train.train_turbo train.diffusion_feature_extractor_path \
         train.latent_feature_extractor_path",
        "hearth has no such loss",
    ),
    refused(
        "model.lora_path model.inference_lora_path \
         model.unconditional_lora_path model.refiner_name_or_path",
        "hearth trains beside the base alone; `hearth export` merges an adapter into it",
    ),
    refused(
        "model.is_xl model.is_v2 model.is_pixart model.is_pixart_sigma model.is_auraflow \
         model.is_lumina2 model.is_ssd model.is_vega",
        TRAINED,
    ),
    refused("network.pretrained_lora_path", "hearth begins with a new adapter"),
    refused(
        "adapter.* embedding.* decorator.* guidance.* slider.* do_lorm process[]*",
        "one LoRA, DoRA or full fine-tune in a job",
    ),
    differs(
        "model.extras_name_or_path model.te_name_or_path model.vae_path model.model_paths.*",
        "all parts are those of base.path; a checkpoint file has base.vae and \
         base.text_encoders beside it",
    ),
    differs(
        "model.accuracy_recovery_adapter model.quantize_kwargs.*",
        "weights are quantised without an adapter that makes up for it",
    ),
    differs("network.all_layers", "layers of the blocks alone; adapter.targets can name others"),
    refused("network.lorm*", "hearth has LoRA and DoRA"),
];
