//! Keys that no function asks for.

use super::super::notes::{KeyRule, differs, no_effect, refused};

pub(super) const RULES: &[KeyRule] = &[
    no_effect(
        "gradient_checkpointing* quantize_via ramtorch* enable_group_offload group_offload_* musubi_block* offload_* \
         delete_model_after_load accelerator_cache_clear_interval vae_batch_size vae_enable_* vae_dtype keep_vae_loaded \
         fuse_qkv_projections sdnq_* quantization_config base_model_default_dtype gradient_precision \
         optimizer_offload_gradients optimizer_cpu_offload_method optimizer_release_gradients fuse_optimizer \
         fully_unload_text_encoder ema_device ema_cpu_only ema_foreach_disable set_grads_to_none unet_attention_slice",
        "the plan chooses how memory is used; the result is the same",
    ),
    no_effect(
        "attention_mechanism sageattention_usage disable_tf32 dynamo_* torch_num_threads \
         sla_config validation_torch_compile*",
        "which kernels compute it; the result is the same",
    ),
    no_effect(
        "cache_dir* compress_disk_cache preserve_data_backend_cache skip_file_discovery write_batch_size read_batch_size \
         image_processing_batch_size text_encoder_batch_size enable_multiprocessing max_workers aws_max_pool_connections \
         dataloader_prefetch* aspect_bucket_worker_count aspect_bucket_disable_rebuild metadata_update_interval \
         override_dataset_config vae_cache_* text_cache_* text_embed_full_cache disable_bucket_pruning \
         allow_dataset_oversubscription ignore_missing_files data_backend_sampling debug_* print_*",
        "images and captions are always encoded once, into the run's cache",
    ),
    no_effect(
        "backends[].id backends[].type backends[].dataset_type backends[].default backends[].disabled \
         backends[].cache_dir* backends[].write_batch_size backends[].text_embeds backends[].image_embeds \
         backends[].skip_file_discovery backends[].preserve_data_backend_cache backends[].vae_cache_* \
         backends[].text_cache_* backends[].hash_filenames backends[].metadata_backend \
         backends[].metadata_update_interval backends[].crop_style backends[].source_dataset_id \
         backends[].text_encoder_batch_size backends[].ignore_epochs backends[].caption_strategy \
         backends[].instance_data_dir backends[].resolution backends[].resolution_type backends[].crop \
         backends[].crop_aspect backends[].repeats backends[].disable_multiline_split",
        "how a backend is found and cached; images and captions are always encoded once",
    ),
    no_effect(
        "report_to tracker_* logging_dir webhook_* merge_environment_config \
         custom_tracker framerate",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "push_to_hub* push_checkpoints_to_hub hub_model_id publishing_config post_* \
         model_card_* modelspec_comment",
        "nothing is uploaded; a model card is written beside the adapter",
    ),
    no_effect(
        "resume_from_checkpoint delete_invalid_checkpoints checkpointing_use_tempdir",
        "`hearth train --resume` resumes its own runs",
    ),
    no_effect(
        "checkpoint_epoch_interval checkpointing_rolling_steps \
         checkpoints_rolling_total_limit",
        "checkpoints are saved by steps",
    ),
    no_effect(
        "validation_* disable_benchmark num_validation_images num_eval_images eval_* evaluation_type \
         pretrained_evaluation_model_name_or_path validate_after_* inference_scheduler_timestep_spacing",
        "samples are drawn as the model's makers do; training is the same",
    ),
    no_effect(
        "num_processes num_machines accelerate_* main_process_* machine_rank same_network \
         local_rank find_unused_parameters seed_for_each_device context_parallel_* fsdp_* \
         deepspeed_config",
        "one computer computes it",
    ),
    no_effect(
        "revision variant trust_remote_code i_know_what_i_am_doing configs_dir \
         user_prompt_library lycoris_config disk_low_*",
        "nothing here depends on it",
    ),
    no_effect("adam_beta1 adam_beta2 adam_weight_decay adam_epsilon", "there with DeepSpeed alone"),
    no_effect("noise_offset noise_offset_probability", "for `offset_noise`"),
    no_effect(
        "snr_gamma prediction_type snr_weight \
         training_scheduler_timestep_spacing rescale_betas_zero_snr timestep_bias_* \
         use_soft_min_snr soft_min_snr_sigma_data",
        "for models without flow matching",
    ),
    no_effect("aspect_bucket_rounding", "buckets follow from data.resolution and data.bucket_step"),
    no_effect("lr_end lr_num_cycles lr_power", "schedules run once over the whole job, to 0"),
    no_effect(
        "nsfw_* enable_nsfw_check delete_nsfw_images data_aesthetic_score",
        "images are not judged",
    ),
    no_effect(
        "strict_epoch_limit t5_padding tokenizer_max_length",
        "as the model's makers have it",
    ),
    no_effect("ema_decay ema_validation ema_update_interval ema_warmup_steps", "for `use_ema`"),
    differs("crepa_*", "hearth has no such second loss").with("crepa_enabled"),
    differs("irepa_*", "hearth has no such second loss").with("irepa_enabled"),
    differs("urepa_*", "hearth has no such second loss").with("urepa_enabled"),
    differs("layersync_*", "hearth has no such second loss").with("layersync_enabled"),
    differs("internal_guidance_*", "hearth has no such second loss")
        .with("internal_guidance_enabled"),
    differs("twinflow_*", "hearth has no such second loss").with("twinflow_enabled"),
    differs("nextlat_*", "hearth has no such second loss").with("nextlat_enabled"),
    differs("xm_*", "hearth has no such second loss").with("xm_enabled"),
    differs("scheduled_sampling_*", "the model sees noised images alone")
        .with("scheduled_sampling_max_step_offset"),
    no_effect(
        "mixflow_gamma diff2flow_loss flow_beta_schedule_alpha flow_beta_schedule_beta \
         refiner_training_*",
        "for what is not switched on",
    ),
    no_effect(
        "audio_* freeze_encoder_* layer_freeze_strategy text_encoder_limit \
         text_encoder_lr save_text_encoder controlnet_* flow_timesteps_mode",
        "for what is not trained here",
    ),
    differs(
        "minimum_image_size maximum_image_size target_downsample_size \
         max_upscale_threshold backends[].minimum_image_size \
         backends[].maximum_image_size backends[].target_downsample_size \
         backends[].minimum_aspect_ratio backends[].maximum_aspect_ratio \
         backends[].max_upscale_threshold delete_unwanted_images \
         delete_problematic_images",
        "images of any size are scaled to their bucket",
    ),
    differs("backends[].probability", "all images are as likely").unless(&["1", "1.0"]),
    differs(
        "backends[].caption_shuffle* backends[].caption_filter_list \
         backends[].only_instance_prompt prepend_instance_prompt only_instance_prompt \
         instance_prompt",
        "captions are used as they are",
    ),
    differs(
        "backends[].start_epoch backends[].end_epoch backends[].start_step \
         backends[].end_step backends[].max_num_samples \
         backends[].timestep_sampling_offset backends[].train_batch_size",
        "all images are trained on from the beginning to the end",
    ),
    differs(
        "flow_use_beta_schedule flow_cubic_schedule_weights flow_custom_timesteps \
         flux_fast_schedule flux_attention_masked_training",
        "timesteps are logit-normal or uniform",
    ),
    no_effect("huber_c huber_schedule", "for `loss_type = huber`"),
    differs(
        "offset_noise input_perturbation* masked_loss_probability lr_scale lr_scale_sqrt \
         tread_config diffusion_blocks_config disable_segmented_timestep_sampling",
        "hearth has no such change of noise, loss or layers",
    ),
    differs("optimizer_config.*", "hearth's optimizer has no such setting"),
    differs(
        "lora_init_type peft_lora_mode singlora_ramp_up_steps init_lokr_norm \
         lora_initialisation_style",
        "LoRA begins as in diffusers' scripts",
    )
    .unless(&["default", "standard", "0", "none"]),
    differs(
        "pretrained_vae_model_name_or_path pretrained_transformer_model_name_or_path \
         pretrained_t5_model_name_or_path qwen_text_encoder_model_name_or_path \
         pretrained_transformer_subfolder",
        "all parts are those of base.path",
    ),
    differs("conditioning_multidataset_sampling", "every image has all of its references")
        .unless(&["combined"]),
    refused(
        "backends[].conditioning backends[].slider_strength slider_lora_target",
        "hearth has reference images alone",
    ),
    refused(
        "backends[].aws_* backends[].parquet* backends[].huggingface* backends[].csv* \
         backends[].dataset_name",
        "hearth reads folders of images on this computer",
    ),
    refused(
        "controlnet control train_text_encoder refiner_training distillation_method \
         diff2flow_enabled mixflow_enabled",
        "hearth trains the transformer by flow matching alone",
    ),
    refused(
        "init_lora init_lora_step init_lora_ema",
        "hearth begins with a new adapter; `hearth export` merges one into the base",
    ),
    no_effect("assistant_lora_* distillation_config", "for what is not switched on"),
];
