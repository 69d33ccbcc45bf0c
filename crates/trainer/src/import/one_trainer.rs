//! `OneTrainer`'s JSON, with its concepts and samples in it or in files beside it. Read in `modules/util/config` of
//! <https://github.com/Nerogar/OneTrainer/tree/23df3832>, whose defaults are those below.

mod adapter;
mod rules;

use serde_json::Value;

use super::ForeignTrainer;
use super::data_folder::{self, DatasetEntry};
use super::error::ImportError;
use super::family::{self, ForeignFamily, TRAINED};
use super::foreign::ForeignConfig;
use super::loss;
use super::mapping::Mapping;
use super::optimization::{self, AdamKeys, TORCH_ADAMW};
use super::precision;
use super::prompts::{self, GuidanceKind, SampleDefaults, SampleNumber, SamplePrompt};
use super::text_encoders::{self, TrainedClip};

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "OneTrainer",
    told_by: "`training_method` or `base_model_name` with `model_type` in capitals",
    recognises: |document| {
        let root = &document.root;
        let is_type = root["model_type"].as_str().is_some_and(|name| name == name.to_uppercase());
        is_type && (root["training_method"].is_string() || root["base_model_name"].is_string())
    },
    keys: |document| Ok(ForeignConfig::new(&document.path, &document.root)),
    map,
    rules: &[rules::RULES],
};

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let family = match mapping.config.text("model_type")?.as_deref() {
        Some("FLUX_DEV_1") => ForeignFamily::Flux,
        Some("STABLE_DIFFUSION_3" | "STABLE_DIFFUSION_35") => ForeignFamily::Sd3,
        Some("QWEN") => ForeignFamily::QwenImage,
        Some("FLUX_2") => ForeignFamily::Flux2Klein,
        Some("Z_IMAGE") => ForeignFamily::ZImage,
        _ => {
            mapping.refuse("model_type", TRAINED);
            return Ok(());
        }
    };
    let method = mapping.config.text("training_method")?;
    let is_full = match method.as_deref().unwrap_or("FINE_TUNE") {
        "LORA" => false,
        "FINE_TUNE" => true,
        _ => {
            mapping.refuse("training_method", "hearth has LoRA, DoRA and full fine-tunes");
            return Ok(());
        }
    };
    base(mapping, family)?;
    precision(mapping, family, is_full)?;
    concepts(mapping)?;
    adapter::write(mapping, family, is_full)?;
    train(mapping, family)?;
    timesteps(mapping)?;
    let mse = ("mse_strength", Some("mse"), 1.0);
    let (mae, huber) = (("mae_strength", Some("l1"), 0.0), ("huber_strength", Some("huber"), 0.0));
    loss::write_by_strength(mapping, &[mse, mae, huber, ("log_cosh_strength", None, 0.0)])?;
    if mapping.config.peek("loss_weight_fn").and_then(Value::as_str) == Some("SIGMA") {
        mapping.config.value("loss_weight_fn");
        mapping.set("train.loss_weighting", "sigma", "loss_weight_fn");
    }
    optimizer(mapping)?;
    text_encoders(mapping, family, is_full)?;
    samples(mapping, family)?;
    output(mapping, family, is_full)
}

/// A transformer of its own stands beside the other parts of the base.
fn base(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let (from, own) = ("base_model_name", "transformer.model_name");
    let Some(path) = mapping.config.text(own)? else {
        let typed = mapping.base(from)?;
        family.refuse_dev(mapping, from, &typed);
        return Ok(());
    };
    family.refuse_dev(mapping, own, &path);
    let path = mapping.places.model(&path);
    mapping.set("base.path", path, own);
    let rest = mapping.config.text(from)?.ok_or_else(|| mapping.config.missing(from))?;
    let rest = mapping.places.model(&rest);
    mapping.set("base.rest", rest, from);
    Ok(())
}

fn precision(
    mapping: &mut Mapping,
    family: ForeignFamily,
    is_full: bool,
) -> Result<(), ImportError> {
    precision::write_dtype(mapping, "train_dtype", "float_16")?;
    let format = mapping.config.text("transformer.weight_dtype")?;
    if !is_full {
        precision::write_quantisation(
            mapping,
            "base.quantise",
            format.as_deref(),
            "transformer.weight_dtype",
        );
    } else if format.as_deref() == Some("BFLOAT_16") {
        mapping.set("train.weight_dtype", "bf16", "transformer.weight_dtype");
    }
    // The largest of the text encoders.
    let from = match family {
        ForeignFamily::Flux => "text_encoder_2.weight_dtype",
        ForeignFamily::Sd3 => "text_encoder_3.weight_dtype",
        _ => "text_encoder.weight_dtype",
    };
    let format = mapping.config.text(from)?;
    precision::write_quantisation(mapping, "base.quantise_encoders", format.as_deref(), from);
    Ok(())
}

/// Adds a list of a file to the keys, unless the config has it itself.
fn list(mapping: &mut Mapping, name: &str, file: &str) -> Result<usize, ImportError> {
    if mapping.config.count(name) == 0
        && let Some(document) = mapping.document(file)?
    {
        mapping.config.add(name, &document.root);
    }
    Ok(mapping.config.count(name))
}

/// Writes `[data]`, or `[[data]]` of several concepts.
fn concepts(mapping: &mut Mapping) -> Result<(), ImportError> {
    for index in 0..list(mapping, "concepts", "concept_file_name")? {
        let key = |name: &str| format!("concepts[{index}].{name}");
        if mapping.config.flag(&key("enabled"))? == Some(false) {
            continue;
        }
        let kind = mapping.config.text(&key("type"))?;
        let is_prior = kind.as_deref() == Some("PRIOR_PREDICTION");
        if !is_prior && !matches!(kind.as_deref(), None | Some("STANDARD")) {
            mapping.refuse(&key("type"), "hearth holds images out by data.validation");
            continue;
        }
        let entry = entry(mapping, index)?;
        data_folder::begin(mapping, &entry);
        if is_prior {
            mapping.set("data.target", "base", &key("type"));
        }
        concept(mapping, index)?;
        data_folder::take_caption_lines(mapping, &entry.folder, &key("text.prompt_source"));
    }
    match mapping.folders[..] {
        [] => Err(mapping.config.missing("concepts")),
        _ => Ok(()),
    }
}

fn entry(mapping: &mut Mapping, index: usize) -> Result<DatasetEntry, ImportError> {
    let key = |name: &str| format!("concepts[{index}].{name}");
    let from = key("path");
    let folder = mapping.config.text(&from)?.ok_or_else(|| mapping.config.missing(&from))?;
    let common = mapping.config.numbers("resolution")?;
    let own = key("image.resolution_override");
    let is_own = mapping.config.flag(&key("image.enable_resolution_override"))? == Some(true);
    let (sizes, sides_from) =
        if is_own { (mapping.config.numbers(&own)?, own) } else { (common, "resolution".into()) };
    let side = sizes.iter().copied().reduce(f64::max).unwrap_or(512.0);
    if sizes.len() > 1 {
        mapping.differs(
            &sides_from,
            format!("every image is seen at {side}, there at one of them by chance"),
        );
    }
    Ok(DatasetEntry {
        folder,
        from,
        repeats: mapping.config.number(&key("balancing"))?.unwrap_or(1.0),
        repeats_from: key("balancing"),
        sides: vec![side],
        sides_from,
        has_sides: !sizes.is_empty(),
    })
}

fn concept(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let key = |name: &str| format!("concepts[{index}].{name}");
    let from = "text_encoder.dropout_probability";
    mapping.number(from, "data.caption_dropout", 0.0)?;
    if mapping.config.flag(&key("text.enable_tag_shuffling"))? == Some(true) {
        mapping.set("data.shuffle_tags", true, &key("text.enable_tag_shuffling"));
        mapping.whole(&key("text.keep_tags_count"), "data.keep_tags", 1)?;
    }
    if mapping.config.flag(&key("image.enable_random_flip"))? == Some(true) {
        mapping.set("data.flip", true, &key("image.enable_random_flip"));
    }
    let weight = mapping.config.number(&key("loss_weight"))?;
    if let Some(weight) = weight.filter(|weight| *weight != 1.0) {
        mapping.set("data.loss_weight", weight, &key("loss_weight"));
    }
    if mapping.config.flag("masked_training")? == Some(true) {
        mapping.set("data.masks", "beside", "masked_training");
        mapping.number("unmasked_weight", "data.unmasked_weight", 0.1)?;
        mapping.number("unmasked_probability", "data.unmasked_probability", 0.1)?;
    }
    let from = key("image.enable_crop_jitter");
    let jitter = mapping.config.flag(&from)?;
    let crop = |is_random: bool| if is_random { "random" } else { "centre" };
    mapping.set_or("data.crop", jitter.map(crop), "random", &from);
    let from = key("text.prompt_source");
    if !matches!(mapping.config.text(&from)?.as_deref(), None | Some("sample")) {
        mapping.refuse(&from, "captions are read from .txt beside images, and from metadata.jsonl");
    }
    let from = key("balancing_strategy");
    if !matches!(mapping.config.text(&from)?.as_deref(), None | Some("REPEATS")) {
        mapping.differs(&from, "`balancing` is taken as repeats of each image");
    }
    Ok(())
}

fn train(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    mapping.whole("epochs", "train.epochs", 100)?;
    mapping.whole("batch_size", "train.batch_size", 1)?;
    mapping.whole("gradient_accumulation_steps", "train.gradient_accumulation", 1)?;
    mapping.limit("clip_grad_norm", "train.max_grad_norm", 1.0)?;
    if mapping.config.text("ema")?.is_some_and(|mode| mode != "OFF") {
        mapping.number("ema_decay", "train.ema", 0.999)?;
        if mapping.value("train.weight_dtype").is_some() {
            mapping.lines.retain(|line| line.key != "train.weight_dtype");
            let why = "weights are held in f32, which an average of them needs";
            mapping.differs("transformer.weight_dtype", why);
        }
        mapping.differs(
            "ema_update_step_interval",
            "the average takes every step, there every fifth unless it says otherwise",
        );
    }
    if family == ForeignFamily::Flux {
        mapping.number("transformer.guidance_scale", "train.guidance_scale", 1.0)?;
    }
    Ok(())
}

fn timesteps(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "timestep_distribution";
    let typed = mapping.config.text(from)?;
    let weight = mapping.config.number("noising_weight")?.unwrap_or(0.0);
    let bias = mapping.config.number("noising_bias")?.unwrap_or(0.0);
    let scheme = match typed.as_deref().unwrap_or("UNIFORM") {
        "UNIFORM" => "uniform",
        "LOGIT_NORMAL" => "logit_normal",
        "HEAVY_TAIL" => "mode",
        _ => {
            mapping
                .differs(from, "hearth has no such distribution of timesteps; all are as likely");
            "uniform"
        }
    };
    mapping.set_or("train.weighting_scheme", typed.map(|_| scheme), scheme, from);
    match scheme {
        "logit_normal" => {
            // A mean above 0 is less noise here.
            mapping.set("train.logit_mean", if bias == 0.0 { 0.0 } else { -bias }, "-noising_bias");
            mapping.set("train.logit_std", weight + 1.0, "noising_weight + 1");
        }
        "mode" => mapping.set("train.mode_scale", weight, "noising_weight"),
        _ => {}
    }
    for (from, key, all) in [
        ("min_noising_strength", "train.timestep_min", 0.0),
        ("max_noising_strength", "train.timestep_max", 1.0),
    ] {
        if let Some(share) = mapping.config.number(from)?.filter(|share| *share != all) {
            mapping.set(key, share * 1000.0, from);
            let why = "timesteps outside are drawn again; there all are squeezed into the range";
            mapping.differs(from, why);
        }
    }
    let shift = mapping.config.number("timestep_shift")?;
    if mapping.config.flag("dynamic_timestep_shifting")? == Some(true) {
        mapping.set("train.timestep_shift", "resolution", "dynamic_timestep_shifting");
    } else {
        mapping.set_or("train.timestep_shift", shift, 1.0, "timestep_shift");
    }
    Ok(())
}

/// All are trained unless the config says otherwise.
fn text_encoders(
    mapping: &mut Mapping,
    family: ForeignFamily,
    is_full: bool,
) -> Result<(), ImportError> {
    const KEYS: [[&str; 2]; 3] = [
        ["text_encoder.train", "text_encoder.learning_rate"],
        ["text_encoder_2.train", "text_encoder_2.learning_rate"],
        ["text_encoder_3.train", "text_encoder_3.learning_rate"],
    ];
    // The last of these families' text encoders is T5.
    let clips: &[&'static str] = match family {
        ForeignFamily::Flux => &["clip-l"],
        ForeignFamily::Sd3 => &["clip-l", "clip-g"],
        _ => &[],
    };
    let (of_clip, others) = KEYS.split_at(if is_full { 0 } else { clips.len() });
    let mut trained = Vec::new();
    for (name, [from, rate_from]) in clips.iter().zip(of_clip) {
        let rate = mapping.config.number(rate_from)?.map(|rate| (*rate_from, rate));
        if mapping.config.flag(from)? != Some(false) {
            trained.push(TrainedClip { name, from, rate });
        }
    }
    text_encoders::write(mapping, trained);
    let n_others = clips.len() + 1 - of_clip.len();
    for [from, _] in &others[..n_others.min(others.len())] {
        if mapping.config.flag(from)? != Some(false) {
            let why = "it is not trained, there it is if this is left out";
            mapping.differs(from, why);
        }
    }
    Ok(())
}

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    optimization::write_kind(mapping, "optimizer.optimizer", "ADAMW")?;
    let own = mapping.config.is_on("transformer.learning_rate");
    let from = if own { "transformer.learning_rate" } else { "learning_rate" };
    mapping.number(from, "optimizer.learning_rate", 3e-6)?;
    let keys = AdamKeys {
        betas: &["optimizer.beta1", "optimizer.beta2"],
        epsilon: "optimizer.eps",
        weight_decay: "optimizer.weight_decay",
        others: "optimizer.",
    };
    optimization::write_settings(mapping, &keys, TORCH_ADAMW)?;
    let from = "learning_rate_scheduler";
    let typed = mapping.config.text(from)?;
    let schedule = match typed.as_deref().unwrap_or("CONSTANT") {
        "CONSTANT" => "constant",
        "LINEAR" => "linear",
        "COSINE" => "cosine",
        _ => {
            mapping.differs(from, "one cosine over the whole run");
            "cosine"
        }
    };
    mapping.set_or("optimizer.lr_scheduler", typed.map(|_| schedule), schedule, from);
    warmup(mapping)
}

/// Counted in batches; up to 1 it is a share of the run.
fn warmup(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "learning_rate_warmup_steps";
    let typed = mapping.config.number(from)?;
    let warmup = typed.unwrap_or(200.0);
    if warmup > 0.0 && warmup <= 1.0 {
        mapping.differs(from, "a share of the steps, whose number is not known before the images are counted: no warmup");
        return Ok(());
    }
    let accumulation =
        mapping.value("train.gradient_accumulation").and_then(Value::as_f64).unwrap_or(1.0);
    let steps = (warmup / accumulation.max(1.0)) as u64;
    mapping.set_or("optimizer.warmup_steps", typed.map(|_| steps), steps, from);
    Ok(())
}

/// Steps between what is done every so often, if that is not counted in time.
fn every(mapping: &mut Mapping, key: &str, unit: &str) -> Result<Option<u64>, ImportError> {
    let Some(count) = mapping.config.whole(key)? else {
        mapping.config.value(unit);
        return Ok(None);
    };
    match mapping.config.text(unit)?.as_deref() {
        Some("STEP") => Ok(Some(count)),
        Some("EPOCH") => Ok(data_folder::steps_of_epochs(mapping, key, count)),
        None | Some("NEVER") => Ok(None),
        Some(_) => {
            mapping.differs(unit, "hearth counts steps: its default");
            Ok(None)
        }
    }
}

fn samples(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let n_samples = list(mapping, "samples", "sample_definition_file_name")?;
    let mut prompts = Vec::new();
    for index in 0..n_samples {
        let key = |name: &str| format!("samples[{index}].{name}");
        if mapping.config.flag(&key("enabled"))? == Some(false) {
            continue;
        }
        prompts.push(SamplePrompt {
            text: mapping.config.text(&key("prompt"))?.unwrap_or_default(),
            negative: mapping.config.text(&key("negative_prompt"))?,
            width: mapping.config.number(&key("width"))?,
            height: mapping.config.number(&key("height"))?,
            seed: mapping.config.number(&key("seed"))?,
            steps: mapping.config.number(&key("diffusion_steps"))?,
            cfg_scale: mapping.config.number(&key("cfg_scale"))?,
            ..SamplePrompt::default()
        });
    }
    let is_flux = family == ForeignFamily::Flux;
    if is_flux {
        for prompt in &mut prompts {
            prompt.guidance = prompt.cfg_scale.take();
        }
    }
    let steps = every(mapping, "sample_after", "sample_after_unit")?;
    let every = SampleNumber::of(steps.map(|steps| steps as f64), "sample_after");
    let defaults = SampleDefaults {
        from: "samples",
        every,
        kind: GuidanceKind::of(family),
        ..SampleDefaults::default()
    };
    prompts::write(mapping, &prompts, defaults);
    Ok(())
}

fn output(mapping: &mut Mapping, family: ForeignFamily, is_full: bool) -> Result<(), ImportError> {
    let typed = mapping.config.text("workspace_dir")?;
    let path = mapping.places.written(typed.as_deref().unwrap_or("workspace/run"));
    mapping.set_or("output.folder", typed.map(|_| path.clone()), path, "workspace_dir");
    if let Some(file) = mapping.config.text("output_model_destination")? {
        let name = file.rsplit(['/', '\\']).next().unwrap_or(&file);
        let name = name.rsplit_once('.').map_or(name, |(stem, _)| stem).to_owned();
        if !name.is_empty() {
            mapping.set("output.name", name, "output_model_destination");
        }
    }
    if let Some(every) = every(mapping, "save_every", "save_every_unit")? {
        mapping.set("output.save_every", every, "save_every");
    }
    let format = mapping.config.text("output_model_format")?;
    if !is_full {
        let name = match format.as_deref().unwrap_or_default() {
            name if name.contains("KOHYA") => "kohya",
            name if name.contains("COMFY") => "comfyui",
            // diffusers has no form for them.
            _ if mapping.value("adapter.kind").is_some_and(|it| it == "loha" || it == "lokr") => {
                "comfyui"
            }
            _ => "diffusers",
        };
        mapping.set_or(
            "output.formats",
            format.map(|_| vec![name]),
            vec![name],
            "output_model_format",
        );
        tell_fused(mapping, family);
    }
    if mapping.config.flag("tensorboard")? == Some(true) {
        mapping.set("output.tensorboard", true, "tensorboard");
    }
    Ok(())
}

/// `needs_qkv_fusion` of OneTrainer's formats, and `fusion_groups` of its models.
fn tell_fused(mapping: &mut Mapping, family: ForeignFamily) {
    let from = "output_model_format";
    let is_fused = mapping
        .config
        .peek(from)
        .and_then(Value::as_str)
        .is_some_and(|format| ["KOHYA_LORA", "ORIGINAL_LORA", "COMFY_LORA"].contains(&format));
    let fuses = [ForeignFamily::Sd3, ForeignFamily::Flux, ForeignFamily::Flux2Klein];
    if is_fused && fuses.contains(&family) {
        family::tell_fused(mapping, from);
    }
}
