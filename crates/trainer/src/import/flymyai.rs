//! `FlyMyAI`'s YAML, upstream and the fork for DGX Spark: one flat table with `data_config` in it. Which of the scripts it
//! is for is told by the model. Read in <https://github.com/FlyMyAI/flymyai-lora-trainer/tree/c092784> and
//! <https://github.com/heathen711/flymyai-lora-trainer/tree/2f098ce>.

use super::ForeignTrainer;
use super::data_folder::{self, DatasetEntry};
use super::error::ImportError;
use super::family::{ForeignFamily, TRAINED};
use super::foreign::ForeignConfig;
use super::mapping::Mapping;
use super::notes::{KeyRule, differs, no_effect};
use super::optimization::{self, AdamKeys, ScheduleDefaults, ScheduleKeys, TORCH_ADAMW};
use super::precision;

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "FlyMyAI",
    told_by: "`data_config` with `pretrained_model_name_or_path`",
    recognises: |document| {
        document.root["data_config"].is_object()
            && document.root["pretrained_model_name_or_path"].is_string()
    },
    keys: |document| Ok(ForeignConfig::new(&document.path, &document.root)),
    map,
    rules: &[RULES],
};

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping.base("pretrained_model_name_or_path")?;
    let Some(family) = ForeignFamily::by_name(&name) else {
        mapping.refuse("pretrained_model_name_or_path", TRAINED);
        return Ok(());
    };
    let is_full = mapping.config.peek("rank").is_none();
    precision(mapping, family, is_full)?;
    data(mapping, family)?;
    adapter(mapping, family, is_full)?;
    mapping.whole("max_train_steps", "train.steps", 3000)?;
    mapping.whole("data_config.train_batch_size", "train.batch_size", 1)?;
    mapping.whole("gradient_accumulation_steps", "train.gradient_accumulation", 1)?;
    mapping.limit("max_grad_norm", "train.max_grad_norm", 1.0)?;
    if let Some(seed) = mapping.config.whole("seed")? {
        mapping.set("train.seed", seed, "seed");
    }
    mapping.set_default("train.weighting_scheme", "uniform", "all timesteps are as likely");
    mapping.set_default("train.timestep_shift", "scheduler", "timesteps of the model's scheduler");
    if family == ForeignFamily::Flux {
        mapping.set_default("train.guidance_scale", 1.0, "the script's guidance");
    }
    optimizer(mapping)?;
    mapping.path("output_dir", "output.folder")?;
    mapping.whole("checkpointing_steps", "output.save_every", 250)?;
    if let Some(keep) = mapping.config.whole("checkpoints_total_limit")? {
        mapping.set("output.keep", keep.max(1), "checkpoints_total_limit");
    }
    Ok(())
}

fn precision(
    mapping: &mut Mapping,
    family: ForeignFamily,
    is_full: bool,
) -> Result<(), ImportError> {
    precision::write_dtype(mapping, "mixed_precision", "bf16")?;
    let is_quantised = mapping.config.flag("quantize")?;
    let is_disabled = mapping.config.flag("disable_quantization")? == Some(true);
    // FLUX's script quantises unless it is told not to; Kandinsky's has its text encoders quantised alone.
    let (base, encoders, from) = match family {
        ForeignFamily::Flux => (!is_disabled, !is_disabled, "disable_quantization"),
        ForeignFamily::Kandinsky5Image | ForeignFamily::Kandinsky5Video => {
            (false, is_quantised == Some(true), "quantize")
        }
        _ => (is_quantised == Some(true) && !is_disabled, false, "quantize"),
    };
    for (key, is_quantised) in [("base.quantise", base), ("base.quantise_encoders", encoders)] {
        if !is_full || key != "base.quantise" {
            precision::write_quantisation(mapping, key, is_quantised.then_some("fp8"), from);
        }
    }
    Ok(())
}

fn data(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let is_video = family == ForeignFamily::Kandinsky5Video;
    let (folder_from, size_from) = if is_video {
        ("data_config.video_dir", "data_config.video_size")
    } else {
        ("data_config.img_dir", "data_config.img_size")
    };
    let folder =
        mapping.config.text(folder_from)?.ok_or_else(|| mapping.config.missing(folder_from))?;
    let size = mapping.config.number(size_from)?;
    let references = mapping.config.text("data_config.control_dir")?;
    let (side, sides_from) = match &references {
        Some(_) => (1024.0, "images of an edit have one megapixel"),
        None => (size.unwrap_or(512.0), size_from),
    };
    let entry = DatasetEntry {
        folder,
        from: folder_from.into(),
        repeats: 1.0,
        repeats_from: String::new(),
        sides: vec![side],
        sides_from: sides_from.into(),
        has_sides: references.is_some() || size.is_some(),
    };
    data_folder::begin(mapping, &entry);
    if references.is_none() && !is_video {
        mapping.differs(
            size_from,
            "the side of a square with the area of the images; there their longer side",
        );
    }
    mapping.set_default("data.bucket_step", 32, "sides are multiples of 32");
    mapping.number("data_config.caption_dropout_rate", "data.caption_dropout", 0.1)?;
    if let Some(path) = references {
        let path = mapping.places.written(&path);
        mapping.set("data.references", path, "data_config.control_dir");
    }
    if is_video {
        mapping.whole("data_config.num_frames", "data.frames", 121)?;
    }
    let ending = mapping.config.text("data_config.caption_type")?.unwrap_or_else(|| "txt".into());
    if ending != "txt" {
        mapping.refuse("data_config.caption_type", "captions are read from .txt and .caption");
    }
    Ok(())
}

fn adapter(mapping: &mut Mapping, family: ForeignFamily, is_full: bool) -> Result<(), ImportError> {
    if is_full {
        mapping.set_default("adapter.kind", "full", "no rank");
        return Ok(());
    }
    let rank = mapping.whole("rank", "adapter.rank", 16)?;
    mapping.set_default("adapter.alpha", rank, "alpha is the rank");
    let targets: &[&str] = match family {
        ForeignFamily::Kandinsky5Image | ForeignFamily::Kandinsky5Video => {
            &["to_query", "to_key", "to_value"]
        }
        _ => &["to_k", "to_q", "to_v", "to_out.0"],
    };
    mapping.set_default("adapter.targets", targets.to_vec(), "the script's target_modules");
    Ok(())
}

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    let mut kind = ("adamw", None);
    for key in ["adam8bit", "use_8bit_adam"] {
        if mapping.config.flag(key)? == Some(true) {
            kind = ("adamw_8bit", Some(key));
        }
    }
    match kind {
        (kind, Some(from)) => mapping.set("optimizer.kind", kind, from),
        (kind, None) => mapping.set_default("optimizer.kind", kind, "adam8bit"),
    }
    let learning_rate = mapping.config.number("learning_rate")?;
    let learning_rate = learning_rate.ok_or_else(|| mapping.config.missing("learning_rate"))?;
    mapping.set("optimizer.learning_rate", learning_rate, "learning_rate");
    let keys = AdamKeys {
        betas: &["adam_beta1", "adam_beta2"],
        epsilon: "adam_epsilon",
        weight_decay: "adam_weight_decay",
        others: "",
    };
    optimization::write_settings(mapping, &keys, TORCH_ADAMW)?;
    let keys = ScheduleKeys {
        name: "lr_scheduler",
        warmup: "lr_warmup_steps",
        cycles: "lr_num_cycles",
        power: "lr_power",
    };
    let default = ScheduleDefaults { name: "constant", warmup: 0.0, power: 1.0 };
    optimization::write_schedule(mapping, &keys, default)
}

const RULES: &[KeyRule] = &[
    no_effect("train_batch_size", "there neither: `data_config.train_batch_size` is the batch"),
    no_effect("num_train_epochs", "`max_train_steps` ends the run"),
    no_effect(
        "precompute_text_embeddings precompute_image_embeddings save_cache_on_disk",
        "images and captions are always encoded once, into the run's cache",
    ),
    no_effect(
        "report_to logging_dir tracker_project_name",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "resume_from_checkpoint",
        "a run of another trainer cannot be resumed; `hearth train --resume` resumes its own",
    ),
    no_effect("data_config.num_workers data_config.pin_memory pin_memory", "how images are loaded"),
    no_effect("freeze_text_encoder", "text encoders are never trained"),
    no_effect(
        "disable_sampling sample_every sample_width sample_height sample_steps",
        "its scripts draw nothing; sample.prompts does",
    ),
    no_effect(
        "use_fastsafetensors fastsafetensors_num_threads unified_memory disable_cpu_offload memory_fraction \
         expandable_segments gradient_checkpointing disable_gradient_checkpointing memory_efficient_attention \
         cuda_features.* cuda_13_features.* aarch64_optimizations.* disable_quantization quantize",
        "the plan chooses how memory is used; the result is the same",
    ),
    differs(
        "data_config.random_ratio",
        "images keep their aspect ratio; there they are cropped to a random one",
    ),
    differs("double_blocks single_blocks", "all blocks are trained; adapter.targets can name some"),
];
