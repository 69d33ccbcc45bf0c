//! Keys that no function asks for.

use super::super::notes::{KeyRule, differs, no_effect, refused};

pub(super) const RULES: &[KeyRule] = &[
    differs(
        "text_encoder.train text_encoder_2.train text_encoder_3.train \
         text_encoder_4.train",
        "of text encoders CLIP's alone are trained",
    ),
    differs("text_encoder.stop_training_after", "all is trained to the end")
        .with("text_encoder.train"),
    differs("text_encoder_2.stop_training_after", "all is trained to the end")
        .with("text_encoder_2.train"),
    differs(
        "text_encoder_2.dropout_probability text_encoder_3.dropout_probability",
        "hearth drops whole captions alone",
    ),
    differs(
        "transformer.attention_mask",
        "text embeddings have no attention mask, as in diffusers",
    ),
    differs(
        "vae.model_name text_encoder.model_name \
         text_encoder_2.model_name text_encoder_3.model_name",
        "all parts are those of base.path; a checkpoint file has base.vae and \
         base.text_encoders beside it",
    ),
    differs("transformer.stop_training_after", "all is trained to the end"),
    refused("transformer.train", "hearth trains the transformer").unless(&["true"]),
    differs(
        "concepts[].image.enable_random_rotate concepts[].image.enable_random_brightness \
         concepts[].image.enable_random_contrast \
         concepts[].image.enable_random_saturation concepts[].image.enable_random_hue \
         concepts[].image.enable_fixed_flip concepts[].image.enable_fixed_rotate \
         concepts[].image.enable_fixed_brightness concepts[].image.enable_fixed_contrast \
         concepts[].image.enable_fixed_saturation concepts[].image.enable_fixed_hue",
        "hearth flips sideways and crops alone",
    ),
    differs("concepts[].include_subdirectories", "folders within are read too").unless(&["true"]),
    differs(
        "concepts[].text.tag_dropout_enable concepts[].text.caps_randomize_enable",
        "captions are used as they are",
    ),
    differs("loss_weight_fn", "all timesteps have the same weight").unless(&["constant"]),
    differs("loss_scaler learning_rate_scaler", "the loss and the rate are as they are written"),
    differs(
        "offset_noise_weight generalized_offset_noise perturbation_noise_weight \
         rescale_noise_scheduler_to_zero_terminal_snr",
        "hearth has no such change of noise",
    ),
    differs(
        "learning_rate_min_factor custom_learning_rate_scheduler scheduler_params*",
        "schedules end at 0",
    ),
    no_effect(
        "lokr_vec_trick lokr_use_tucker lokr_dora_on_output",
        "how layers are computed; there are no convolutions",
    ),
    no_effect("lokr_*", "for `peft_type = LOKR`"),
    differs("learning_rate_cycles", "schedules run once over the whole job").unless(&["1", "1.0"]),
    differs(
        "normalize_masked_area_loss",
        "the loss of an image with a mask is the mean over all of it",
    )
    .with("masked_training"),
    differs("masked_prior_preservation_weight", "what a mask leaves out has no loss of its own")
        .with("masked_training"),
    refused(
        "custom_conditioning_image force_v_prediction force_epsilon_prediction",
        "hearth trains by flow matching alone",
    ),
    refused("lora_model_name", "hearth begins with a new adapter"),
    no_effect(
        "__version config_version debug_mode debug_dir cache_dir huggingface_cache_dir \
         offline_mode continue_last_backup prevent_overwrites include_train_config \
         only_cache clear_cache_before_training latent_caching dataloader_threads \
         secrets.* cloud.*",
        "how the program runs; the result is the same",
    ),
    no_effect(
        "train_device temp_device multi_gpu device_indexes gradient_reduce_precision \
         fused_gradient_reduce async_* enable_autocast_cache compile attention_mechanism \
         force_circular_padding gradient_checkpointing layer_offload_fraction \
         quantization.*",
        "the plan chooses how it is computed; the result is the same",
    ),
    no_effect(
        "weight_dtype output_dtype fallback_train_dtype lora_weight_dtype \
         embedding_weight_dtype vae.* unet.* prior.* decoder* effnet_encoder.* \
         unconditional_transformer.*",
        "parts that are not trained; the adapter is trained in f32",
    ),
    no_effect(
        "transformer.* text_encoder.* text_encoder_2.* text_encoder_3.* text_encoder_4.* \
         text_encoder_layer_skip text_encoder_2_layer_skip text_encoder_3_layer_skip \
         text_encoder_4_layer_skip text_encoder_sequence_length \
         text_encoder_2_sequence_length",
        "memory, and text encoders, which read captions as the model's makers have it",
    ),
    no_effect(
        "tensorboard_* samples_to_tensorboard sample_image_format sample_video_format \
         sample_audio_format sample_skip_first sample_definition_file_name \
         non_ema_sampling samples[].*",
        "samples alone depend on it",
    ),
    no_effect(
        "backup_* rolling_backup* save_skip_first save_filename_prefix validate_after \
         validate_after_unit validation",
        "checkpoints always hold the whole state; data.validation holds images out",
    ),
    no_effect(
        "optimizer_defaults.* optimizer.foreach optimizer.fused optimizer.is_paged \
         optimizer.optim_bits optimizer.min_8bit_size optimizer.quant_block_size \
         optimizer.percentile_clipping optimizer.block_wise optimizer.capturable \
         optimizer.differentiable optimizer.maximize optimizer.stochastic_rounding \
         optimizer.compile optimizer.fsdp_in_use optimizer.fused_back_pass",
        "how the optimizer computes",
    ),
    differs("optimizer.*", "hearth's AdamW has no such setting"),
    no_effect("aspect_ratio_bucketing frames", "images keep their aspect ratio"),
    no_effect(
        "embedding.* additional_embeddings* bundle_additional_embeddings \
         embedding_learning_rate preserve_embedding_norm oft_* lora_decompose_* \
         svd_dtype svd_rank",
        "for what is not trained here",
    ),
    no_effect(
        "concepts[].name concepts[].seed concepts[].concept_stats* \
         concepts[].text_variations concepts[].image_variations concepts[].text.* \
         concepts[].image.* concepts[].path concepts[].balancing \
         concepts[].balancing_strategy",
        "nothing here depends on it",
    ),
    no_effect("huber_delta loss_weight_strength vb_loss_strength", "for losses that are off"),
    no_effect("unmasked_probability unmasked_weight", "for `masked_training`"),
    no_effect("ema_decay ema_update_step_interval", "for `ema`"),
];
