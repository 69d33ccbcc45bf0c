//! diffusion-pipe's TOML, and that of its data set. Read in `train.py`, `utils/dataset.py` and `models/` of
//! <https://github.com/tdrussell/diffusion-pipe/tree/8f83dbf>.

use serde_json::Value;

use super::ForeignTrainer;
use super::data_folder::{self, DatasetEntry};
use super::document::Document;
use super::error::ImportError;
use super::family::{self, ForeignFamily, TRAINED};
use super::foreign::ForeignConfig;
use super::loss;
use super::mapping::Mapping;
use super::notes::{KeyRule, differs, no_effect, refused};
use super::optimization::{
    self, AdamDefaults, AdamKeys, ScheduleDefaults, ScheduleKeys, TORCH_ADAMW,
};
use super::precision;
use super::training_adapter;

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "diffusion-pipe",
    told_by: "`[model]` with a `type`, and `dataset`",
    recognises: |document| {
        let root = &document.root;
        let is_main = root["model"]["type"].is_string()
            && (root["dataset"].is_string() || root["epochs"].is_number());
        is_main || root["directory"][0]["path"].is_string()
    },
    keys,
    map,
    rules: &[RULES],
};

/// Where the keys of the data set's file stand.
const DATASET: &str = "dataset_file";

fn keys(document: &Document) -> Result<ForeignConfig, ImportError> {
    if document.root["directory"].is_array() {
        return Err(ImportError::Half {
            found: "the file of the data set",
            needed: "the config that names this one as `dataset`",
            path: document.path.clone(),
        });
    }
    Ok(ForeignConfig::new(&document.path, &document.root))
}

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let family = match mapping.config.text("model.type")?.as_deref() {
        Some("flux") => ForeignFamily::Flux,
        Some("sd3") => ForeignFamily::Sd3,
        Some("qwen_image") => ForeignFamily::QwenImage,
        Some("flux2") => ForeignFamily::Flux2Klein,
        Some("z_image") => ForeignFamily::ZImage,
        _ => {
            mapping.refuse("model.type", TRAINED);
            return Ok(());
        }
    };
    let has_adapter = mapping.config.left_over().iter().any(|(key, _)| key.starts_with("adapter."));
    model(mapping, family, has_adapter)?;
    data(mapping)?;
    adapter(mapping, family, has_adapter)?;
    merged_adapters(mapping)?;
    train(mapping)?;
    timesteps(mapping, family)?;
    loss::write_by_threshold(
        mapping,
        &[("huber_delta", "huber"), ("smooth_l1_beta", "smooth_l1")],
    )?;
    optimizer(mapping)?;
    output(mapping, family)
}

fn model(
    mapping: &mut Mapping,
    family: ForeignFamily,
    has_adapter: bool,
) -> Result<(), ImportError> {
    let folder = mapping.config.text("model.diffusers_path")?;
    let file = if mapping.config.peek("model.transformer_path").is_some() {
        "model.transformer_path"
    } else {
        "model.diffusion_model"
    };
    match (mapping.config.peek(file).is_some(), folder) {
        (true, folder) => {
            let typed = mapping.base(file)?;
            family.refuse_dev(mapping, file, &typed);
            if let Some(folder) = folder {
                let folder = mapping.places.model(&folder);
                mapping.set("base.rest", folder, "model.diffusers_path");
            }
        }
        (false, _) => _ = mapping.base("model.diffusers_path")?,
    }
    for key in ["model.vae_path", "model.vae"] {
        if let Some(path) = mapping.config.text(key)? {
            let path = mapping.places.written(&path);
            mapping.set("base.vae", path, key);
        }
    }
    text_encoders(mapping, file)?;
    precision::write_dtype(mapping, "model.dtype", "bfloat16")?;
    let (own, comfy) = ("model.transformer_dtype", "model.diffusion_model_dtype");
    let from = if mapping.config.peek(comfy).is_some() { comfy } else { own };
    let format = mapping.config.text(from)?;
    if has_adapter {
        precision::write_quantisation(mapping, "base.quantise", format.as_deref(), from);
    }
    mapping.set_default("base.quantise_encoders", "none", "text encoders are not quantised");
    Ok(())
}

/// One file, or ComfyUI's list of them, whose tokenizers are in its program.
fn text_encoders(mapping: &mut Mapping, file: &str) -> Result<(), ImportError> {
    let own = "model.text_encoder_path";
    if let Some(path) = mapping.config.text(own)? {
        let path = mapping.places.written(&path);
        mapping.set("base.text_encoders", vec![path], own);
    }
    let list = "model.text_encoders";
    let mut paths = Vec::new();
    for index in 0..mapping.config.count(list) {
        for name in ["path", "paths"] {
            for path in mapping.config.texts(&format!("{list}[{index}].{name}"))? {
                paths.push(mapping.places.written(&path));
            }
        }
    }
    if !paths.is_empty() {
        mapping.set("base.text_encoders", paths, &format!("{list}[0].path"));
        let why = "its tokenizers, which ComfyUI has: give base.rest a diffusers folder of the model, or one with them";
        mapping.needs(file, why);
    }
    Ok(())
}

/// An adapter that is merged into the base before training.
fn merged_adapters(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "model.merge_adapters";
    match &mapping.config.texts(from)?[..] {
        [] => {}
        [path] => {
            let path = mapping.places.written(path);
            training_adapter::write(mapping, &path, from);
        }
        _ => mapping.refuse(from, "hearth has one adapter beside the one that is trained"),
    }
    Ok(())
}

/// Writes `[data]`, or `[[data]]` of several directories.
fn data(mapping: &mut Mapping) -> Result<(), ImportError> {
    let file = mapping.document("dataset")?.ok_or_else(|| mapping.config.missing("dataset"))?;
    mapping.config.add(DATASET, &file.root);
    let n_directories = mapping.config.count(&format!("{DATASET}.directory"));
    for index in 0..n_directories {
        let entry = entry(mapping, index)?;
        data_folder::begin(mapping, &entry);
        mapping.set_default("data.bucket_step", 32, "sides are multiples of 32");
        captions(mapping, index)?;
    }
    match n_directories {
        0 => Err(mapping.config.missing(&format!("{DATASET}.directory"))),
        _ => Ok(()),
    }
}

fn key(index: usize, name: &str) -> String {
    format!("{DATASET}.directory[{index}].{name}")
}

/// The key of a directory, or that of all of them.
fn own_or_common(mapping: &mut Mapping, index: usize, name: &str) -> String {
    let (own, common) = (key(index, name), format!("{DATASET}.{name}"));
    mapping.config.value(&common);
    if mapping.config.peek(&own).is_some() { own } else { common }
}

fn entry(mapping: &mut Mapping, index: usize) -> Result<DatasetEntry, ImportError> {
    let from = key(index, "path");
    let folder = mapping.config.text(&from)?.ok_or_else(|| mapping.config.missing(&from))?;
    let sides_from = own_or_common(mapping, index, "resolutions");
    let value = mapping.config.value(&sides_from);
    let value = value.ok_or_else(|| mapping.config.missing(&sides_from))?;
    let sides = sides(&value)
        .ok_or_else(|| mapping.config.refuse(&sides_from, &value, "a list of sides or sizes"))?;
    Ok(DatasetEntry {
        folder,
        from,
        repeats: mapping.config.number(&key(index, "num_repeats"))?.unwrap_or(1.0),
        repeats_from: key(index, "num_repeats"),
        sides,
        sides_from,
        has_sides: true,
    })
}

/// Sides, or sizes of the same area.
fn sides(value: &Value) -> Option<Vec<f64>> {
    let side = |value: &Value| match value {
        Value::Number(number) => number.as_f64(),
        Value::Array(size) => {
            let size: Option<Vec<f64>> = size.iter().map(Value::as_f64).collect();
            data_folder::side(&size?)
        }
        _ => None,
    };
    let sides: Vec<f64> = value.as_array()?.iter().map(side).collect::<Option<_>>()?;
    (!sides.is_empty()).then_some(sides)
}

fn captions(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    mapping.number("uncond_fraction", "data.caption_dropout", 0.0)?;
    let shuffled = own_or_common(mapping, index, "shuffle_tags");
    let number = own_or_common(mapping, index, "cache_shuffle_num");
    let is_shuffled = mapping.config.flag(&shuffled)? == Some(true);
    let n_orders = mapping.config.whole(&number)?.unwrap_or(0);
    if is_shuffled || n_orders > 0 {
        mapping.set("data.shuffle_tags", true, if is_shuffled { &shuffled } else { &number });
        mapping.set_default("data.keep_tags", 0, "all tags are shuffled");
    }
    let prefix = own_or_common(mapping, index, "caption_prefix");
    data_folder::write_caption_prefix(mapping, &prefix)?;
    let from = key(index, "mask_path");
    if let Some(path) = mapping.config.text(&from)? {
        let path = mapping.places.written(&path);
        mapping.set("data.masks", path, &from);
    }
    let from = key(index, "control_path");
    if let Some(path) = mapping.config.text(&from)? {
        let path = mapping.places.written(&path);
        mapping.set("data.references", path, &from);
        mapping.differs(
            &from,
            "references are scaled to data.reference_resolution, there to the size of the image",
        );
    }
    Ok(())
}

fn adapter(
    mapping: &mut Mapping,
    family: ForeignFamily,
    has_adapter: bool,
) -> Result<(), ImportError> {
    if !has_adapter {
        mapping.set_default("adapter.kind", "full", "no [adapter]");
        return Ok(());
    }
    match mapping.config.text("adapter.type")?.as_deref() {
        Some("lora") => mapping.set("adapter.kind", "lora", "adapter.type"),
        _ => mapping.refuse("adapter.type", "hearth has LoRA and DoRA"),
    }
    let rank = mapping
        .config
        .whole("adapter.rank")?
        .ok_or_else(|| mapping.config.missing("adapter.rank"))?;
    mapping.set("adapter.rank", rank, "adapter.rank");
    mapping.set_default("adapter.alpha", rank, "alpha is the rank");
    mapping.number("adapter.dropout", "adapter.dropout", 0.0)?;
    let why = "all linear layers of the blocks";
    match family {
        // The refiners too.
        ForeignFamily::ZImage => {
            mapping.set_default("adapter.targets", vec!["all", "adaLN_modulation.0"], why);
        }
        _ => mapping.set_default("adapter.targets", family.all_layers(), why),
    }
    if matches!(family, ForeignFamily::Flux2Klein | ForeignFamily::ZImage) {
        family::tell_fused(mapping, "adapter");
    }
    let excluded = mapping.config.texts("adapter.exclude_modules")?;
    if !excluded.is_empty() {
        mapping.set("adapter.exclude", excluded, "adapter.exclude_modules");
    }
    Ok(())
}

fn train(mapping: &mut Mapping) -> Result<(), ImportError> {
    let steps = mapping.config.whole("max_steps")?;
    let epochs = mapping.config.whole("epochs")?;
    match (steps, epochs) {
        (Some(steps), epochs) => {
            mapping.set("train.steps", steps, "max_steps");
            if epochs.is_some() {
                mapping.no_effect(
                    "epochs",
                    "the run ends after `max_steps`, unless so many epochs are fewer steps",
                );
            }
        }
        (None, Some(epochs)) => mapping.set("train.epochs", epochs, "epochs"),
        (None, None) => return Err(mapping.config.missing("epochs")),
    }
    batch(mapping)?;
    mapping.whole("gradient_accumulation_steps", "train.gradient_accumulation", 1)?;
    mapping.limit("gradient_clipping", "train.max_grad_norm", 1.0)
}

/// One size, or pairs of a resolution and its size.
fn batch(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "micro_batch_size_per_gpu";
    let value = mapping.config.value(from);
    let pairs = value.as_ref().and_then(Value::as_array).cloned().unwrap_or_default();
    let Some(last) = pairs.iter().max_by(|a, b| {
        let side = |pair: &Value| pair[0].as_f64().unwrap_or_default();
        side(a).total_cmp(&side(b))
    }) else {
        return mapping.whole(from, "train.batch_size", 1).map(drop);
    };
    let size = last[1].as_u64();
    let size = size.ok_or_else(|| {
        mapping.config.refuse(from, last, "a number, or pairs of a resolution and a number")
    })?;
    if pairs.len() > 1 {
        mapping.differs(from, "all batches have the size of the largest resolution");
    }
    mapping.set("train.batch_size", size, from);
    Ok(())
}

fn timesteps(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let from = "model.timestep_sample_method";
    let typed = mapping.config.text(from)?;
    let scheme = match typed.as_deref().unwrap_or("logit_normal") {
        "uniform" => "uniform",
        "logit_normal" => "logit_normal",
        other => {
            return Err(mapping.config.refuse(
                from,
                &Value::from(other),
                "logit_normal or uniform",
            ));
        }
    };
    mapping.set_or("train.weighting_scheme", typed.map(|_| scheme), scheme, from);
    if scheme == "logit_normal" {
        mapping.number("model.sigmoid_scale", "train.logit_std", 1.0)?;
    }
    let shift = mapping.config.number("model.shift")?;
    let is_by_size = mapping.config.flag("model.flux_shift")? == Some(true);
    match shift.filter(|shift| *shift > 0.0) {
        Some(shift) => mapping.set("train.timestep_shift", shift, "model.shift"),
        None if is_by_size => mapping.set("train.timestep_shift", "resolution", "model.flux_shift"),
        None => mapping.set_default("train.timestep_shift", 1.0, "model.shift"),
    }
    let is_bypassed = mapping.config.flag("model.bypass_guidance_embedding")? == Some(true);
    if family == ForeignFamily::Flux && is_bypassed {
        mapping.set("train.guidance_scale", "off", "model.bypass_guidance_embedding");
    } else if family == ForeignFamily::Flux {
        mapping.number("model.guidance", "train.guidance_scale", 1.0)?;
    }
    Ok(())
}

/// Taken: `optimi.AdamW`.
const OPTIMI_ADAMW: AdamDefaults =
    AdamDefaults { betas: [0.9, 0.99], epsilon: 1e-6, weight_decay: 0.0 };

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping
        .config
        .text("optimizer.type")?
        .ok_or_else(|| mapping.config.missing("optimizer.type"))?;
    optimization::write_kind(mapping, "optimizer.type", "")?;
    let from = if mapping.config.is_on("force_constant_lr") {
        "force_constant_lr"
    } else {
        "optimizer.lr"
    };
    let rate = mapping.config.number(from)?.ok_or_else(|| mapping.config.missing(from))?;
    mapping.set("optimizer.learning_rate", rate, from);
    let keys = AdamKeys {
        betas: &["optimizer.betas"],
        epsilon: "optimizer.eps",
        weight_decay: "optimizer.weight_decay",
        others: "optimizer.",
    };
    let default = if name.to_lowercase() == "adamw_optimi" { OPTIMI_ADAMW } else { TORCH_ADAMW };
    optimization::write_settings(mapping, &keys, default)?;
    let keys = ScheduleKeys { name: "lr_scheduler", warmup: "warmup_steps", cycles: "", power: "" };
    // It warms up with any schedule.
    let name = mapping.config.text("lr_scheduler")?;
    if name.as_deref().unwrap_or("constant") == "constant" {
        mapping.set_or("optimizer.lr_scheduler", name, "constant", "lr_scheduler");
        mapping.whole("warmup_steps", "optimizer.warmup_steps", 0)?;
        return Ok(());
    }
    if mapping.value("train.steps").is_some() {
        mapping
            .differs("lr_scheduler", "the rate falls to 0 over `max_steps`, there over `epochs`");
    }
    optimization::write_schedule(
        mapping,
        &keys,
        ScheduleDefaults { name: "constant", warmup: 0.0, power: 1.0 },
    )
}

fn output(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    mapping.path("output_dir", "output.folder")?;
    let mut every = mapping.config.whole("save_every_n_steps")?;
    let mut from = "save_every_n_steps";
    if let Some(epochs) = mapping.config.whole("save_every_n_epochs")? {
        from = "save_every_n_epochs";
        every = every.or(data_folder::steps_of_epochs(mapping, from, epochs));
    }
    if let Some(examples) = mapping.config.whole("save_every_n_examples")? {
        from = "save_every_n_examples";
        let number = |key: &str| mapping.value(key).and_then(Value::as_u64).unwrap_or(1);
        let batch =
            number("train.batch_size").saturating_mul(number("train.gradient_accumulation"));
        every = every.or(Some((examples / batch.max(1)).max(1)));
    }
    if let Some(every) = every {
        mapping.set("output.save_every", every, from);
    }
    let format = match family {
        ForeignFamily::QwenImage | ForeignFamily::Flux2Klein | ForeignFamily::ZImage => "comfyui",
        _ => "diffusers",
    };
    mapping.set_default("output.formats", vec![format], "its own format");
    Ok(())
}

const RULES: &[KeyRule] = &[
    no_effect(
        "pipeline_stages partition_method partition_split blocks_to_swap activation_checkpointing \
         reentrant_activation_checkpointing disable_block_swap_for_eval compile map_num_proc caching_batch_size \
         steps_per_print logging_steps x_axis_examples regenerate_cache",
        "the plan chooses how memory is used; the result is the same",
    ),
    no_effect(
        "monitoring.*",
        "hearth logs to events.jsonl and report.html, and to TensorBoard with output.tensorboard",
    ),
    no_effect(
        "eval_* image_eval_micro_batch_size_per_gpu",
        "held-out loss is measured on a part of the images, data.validation",
    ),
    no_effect(
        "checkpoint_every_n_epochs checkpoint_every_n_minutes save_dtype adapter.dtype",
        "checkpoints always hold the whole state",
    ),
    no_effect(
        "image_micro_batch_size_per_gpu video_clip_mode model.cache_text_embeddings \
         model.max_sequence_length",
        "as hearth does it",
    ),
    no_effect("dataset_file.frame_buckets dataset_file.directory[].frame_buckets", "for videos"),
    no_effect(
        "dataset_file.enable_ar_bucket dataset_file.directory[].enable_ar_bucket",
        "images always keep their aspect ratio",
    ),
    no_effect(
        "dataset_file.cache_shuffle_delimiter dataset_file.shuffle_metadata \
         dataset_file.online_captions dataset_file.skip_empty_caption",
        "as hearth does it",
    ),
    no_effect("optimizer.stabilize", "for bfloat16 weights; the adapter is trained in f32"),
    differs(
        "dataset_file.min_ar dataset_file.max_ar dataset_file.num_ar_buckets dataset_file.ar_buckets \
         dataset_file.size_buckets dataset_file.directory[].min_ar dataset_file.directory[].max_ar \
         dataset_file.directory[].num_ar_buckets dataset_file.directory[].ar_buckets \
         dataset_file.directory[].size_buckets",
        "buckets have sides that are multiples of data.bucket_step, and the area of \
         data.resolution",
    ),
    differs(
        "dataset_file.subsample_ratio dataset_file.directory[].subsample_ratio",
        "all images are trained on",
    ),
    differs("pseudo_huber_c", "the loss is the mean squared error"),
    differs("optimizer.*", "hearth's optimizer has no such setting"),
    refused(
        "dataset_file.directory[].default_mask_file",
        "every image has a mask of its own in data.masks, or counts as a whole",
    ),
    refused("adapter.alpha", "diffusion-pipe refuses it too: alpha is the rank"),
    refused(
        "adapter.init_from_existing adapter.fuse_adapters* init_from_existing",
        "hearth begins with a new adapter; `hearth export` merges one into the base",
    ),
    refused("resume_from_checkpoint", "a run of another trainer cannot be resumed"),
    no_effect("model.text_encoders[].type", "the file tells it"),
    refused("adapter.decompose_factor adapter.rank_dropout", "hearth has LoRA and DoRA"),
];
