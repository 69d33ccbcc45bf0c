//! sd-scripts: LoRA and full fine-tunes of FLUX.1 and SD3.

use serde_json::Value;

use super::super::data_folder::{self, DatasetEntry};
use super::super::error::ImportError;
use super::super::family::{ForeignFamily, TRAINED};
use super::super::loss;
use super::super::mapping::Mapping;
use super::super::prompts::{GuidanceKind, SampleDefaults, SampleNumber};
use super::super::text_encoders::{self, TrainedClip};
use super::datasets::{self, Sections};
use super::{DATASET, flags, layer_patterns, timesteps};

pub(super) fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let program = mapping.config.text("program")?.unwrap_or_default();
    let module = mapping.config.text("network_module")?;
    // LyCORIS' modules are for all families.
    let of_family = module.as_deref().filter(|module| !flags::is_lycoris(module));
    let Some(family) = family(mapping, of_family, &program) else {
        let from =
            if module.is_some() { "network_module" } else { "pretrained_model_name_or_path" };
        mapping.refuse(from, TRAINED);
        return Ok(());
    };
    let is_full = module.is_none();
    let encoders: &[&str] = match family {
        ForeignFamily::Flux => &["clip_l", "t5xxl"],
        _ => &["clip_l", "clip_g", "t5xxl"],
    };
    let vae = if family == ForeignFamily::Flux { "ae" } else { "vae" };
    flags::base(mapping, "pretrained_model_name_or_path", vae, encoders)?;
    flags::precision(mapping, is_full)?;
    data(mapping)?;
    if is_full {
        mapping.set_default("adapter.kind", "full", "no network_module");
    } else {
        network(mapping, family)?;
    }
    flags::length(mapping)?;
    loss(mapping, family)?;
    flags::timestep_range(mapping)?;
    flags::optimizer(mapping)?;
    if !is_full {
        text_encoders(mapping, family)?;
    }
    let is_flux = family == ForeignFamily::Flux;
    let number = SampleNumber::unless_said;
    let defaults = SampleDefaults {
        width: number(512.0),
        height: number(512.0),
        steps: number(if is_flux { 20.0 } else { 30.0 }),
        cfg_scale: number(if is_flux { 1.0 } else { 7.5 }),
        guidance: number(3.5),
        kind: GuidanceKind::of(family),
        ..SampleDefaults::default()
    };
    flags::samples(mapping, defaults)?;
    flags::output(mapping)
}

fn family(mapping: &Mapping, module: Option<&str>, program: &str) -> Option<ForeignFamily> {
    let has = |key: &str| mapping.config.peek(key).is_some();
    match module {
        Some(module) if module.ends_with("lora_flux") => Some(ForeignFamily::Flux),
        Some(module) if module.ends_with("lora_sd3") => Some(ForeignFamily::Sd3),
        None if program.starts_with("flux_train") || has("ae") => Some(ForeignFamily::Flux),
        None if program.starts_with("sd3_train") || has("clip_g") => Some(ForeignFamily::Sd3),
        _ => None,
    }
}

/// Writes `[data]`, or `[[data]]` of several subsets.
fn data(mapping: &mut Mapping) -> Result<(), ImportError> {
    if let Some(file) = mapping.document("dataset_config")? {
        mapping.config.add(DATASET, &file.root);
    }
    let mut subsets = datasets::subsets(mapping);
    let mut names: &[&str] = &["image_dir"];
    if subsets.is_empty() {
        if mapping.config.peek("train_data_dir").is_none() {
            return Err(mapping.config.missing("dataset_config"));
        }
        (subsets, names) = (vec![Sections::flags()], &["train_data_dir"]);
    }
    for subset in &subsets {
        let folder = datasets::begin(mapping, subset, names, &[512.0])?;
        let from = subset.key(mapping, "bucket_reso_steps");
        mapping.whole(&from, "data.bucket_step", 64)?;
        captions(mapping, subset)?;
        masks(mapping, subset)?;
        let from = subset.key(mapping, "is_reg");
        if mapping.config.flag(&from)? == Some(true) {
            regularisation(mapping, &from)?;
        }
        let ending = datasets::caption_ending(mapping, subset, ".caption")?;
        let from = subset.key(mapping, "enable_wildcard");
        if mapping.config.flag(&from)? == Some(true) {
            mapping.set("data.caption_choice", "wildcards", &from);
        } else {
            let there = "kohya the first line";
            data_folder::tell_caption_lines(mapping, &folder, &[&ending], "caption lines", there);
        }
    }
    if let Some(folder) = mapping.config.text("reg_data_dir")? {
        let (from, repeats_from) = ("reg_data_dir".to_owned(), String::new());
        let sides = mapping.value("data.resolution").and_then(Value::as_f64).into_iter().collect();
        let (repeats, sides_from, has_sides) = (1.0, "resolution".to_owned(), true);
        let entry =
            DatasetEntry { folder, from, repeats, repeats_from, sides, sides_from, has_sides };
        data_folder::begin(mapping, &entry);
        captions(mapping, &subsets[0])?;
        regularisation(mapping, "reg_data_dir")?;
    }
    datasets::batches(mapping, &subsets[0])?;
    datasets::tell_others(mapping, &subsets, &["batch_size", "enable_bucket", "bucket_no_upscale"]);
    Ok(())
}

fn captions(mapping: &mut Mapping, subset: &Sections) -> Result<(), ImportError> {
    let from = subset.key(mapping, "caption_dropout_rate");
    mapping.number(&from, "data.caption_dropout", 0.0)?;
    let from = subset.key(mapping, "shuffle_caption");
    if mapping.config.flag(&from)? == Some(true) {
        mapping.set("data.shuffle_tags", true, &from);
        let from = subset.key(mapping, "keep_tokens");
        mapping.whole(&from, "data.keep_tags", 0)?;
    }
    for (name, key, value) in [
        ("flip_aug", "data.flip", Value::from(true)),
        ("random_crop", "data.crop", Value::from("random")),
    ] {
        let from = subset.key(mapping, name);
        if mapping.config.flag(&from)? == Some(true) {
            mapping.set(key, value, &from);
        }
    }
    let from = subset.key(mapping, "caption_prefix");
    data_folder::write_caption_prefix(mapping, &from)?;
    let from = subset.key(mapping, "validation_split");
    if let Some(share) = mapping.config.number(&from)?.filter(|share| *share > 0.0) {
        mapping.set("data.validation", share, &from);
    }
    Ok(())
}

/// A set as regularisation images; how often each is seen follows from the others.
fn regularisation(mapping: &mut Mapping, from: &str) -> Result<(), ImportError> {
    mapping.set("data.regularisation", true, from);
    mapping.leave_out(&["data.repeats", "data.validation"]);
    let weight = mapping.config.number("prior_loss_weight")?;
    if let Some(weight) = weight.filter(|weight| *weight != 1.0) {
        mapping.set("data.loss_weight", weight, "prior_loss_weight");
    }
    Ok(())
}

/// Without `masked_loss` it is a folder of images for `ControlNet`.
fn masks(mapping: &mut Mapping, subset: &Sections) -> Result<(), ImportError> {
    let is_masked = mapping.config.flag("masked_loss")? == Some(true);
    let from = subset.key(mapping, "conditioning_data_dir");
    match mapping.config.text(&from)? {
        Some(folder) if is_masked => {
            let folder = mapping.places.written(&folder);
            mapping.set("data.masks", folder, &from);
        }
        Some(_) => mapping
            .refuse(&from, "hearth has no ControlNet; with `masked_loss` it is a folder of masks"),
        None => {}
    }
    let from = subset.key(mapping, "alpha_mask");
    if mapping.config.flag(&from)? == Some(true) {
        mapping.set("data.masks", "alpha", &from);
    }
    Ok(())
}

fn network(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    flags::network(mapping)?;
    let mut targets = vec!["kohya"];
    if family == ForeignFamily::Flux {
        if mapping.config.flag("network_args.split_qkv")? != Some(true) {
            let why = "q, k and v of a block have a LoRA each; there they share the lower half unless it is True";
            mapping.differs("network_args.split_qkv", why);
        }
        match mapping.config.text("network_args.train_blocks")?.as_deref() {
            Some("double") => targets = vec!["transformer_blocks.*"],
            Some("single") => targets = vec!["single_transformer_blocks.*"],
            _ => {}
        }
    }
    match targets[..] {
        ["kohya"] => mapping.set_default("adapter.targets", "kohya", "what kohya trains"),
        _ => mapping.set("adapter.targets", targets.clone(), "network_args.train_blocks"),
    }
    if family == ForeignFamily::Flux {
        layer_patterns::write(mapping, &targets)?;
    }
    Ok(())
}

/// Without `network_train_unet_only` CLIP's text encoders are trained too, each with its own learning rate or all with one.
fn text_encoders(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let (from, rates_from) = ("network_train_unet_only", "text_encoder_lr");
    if mapping.config.flag(from)? == Some(true) {
        return Ok(());
    }
    let mut rates = mapping.config.numbers(rates_from)?;
    let mut rate_key = rates_from;
    // What neither flag names has the learning rate of all.
    if rates.is_empty() && mapping.config.is_on("unet_lr") {
        rate_key = "learning_rate";
        rates.push(mapping.config.number(rate_key)?.unwrap_or(2e-6));
        mapping.notes.retain(|note| note.key != rate_key);
    }
    let names: &[&str] = match family {
        ForeignFamily::Flux => &["clip-l"],
        _ => &["clip-l", "clip-g"],
    };
    let clip = |(index, name): (usize, &&'static str)| {
        let rate = rates.get(index).or(rates.first());
        TrainedClip { name, from, rate: rate.map(|rate| (rate_key, *rate)) }
    };
    text_encoders::write(mapping, names.iter().enumerate().map(clip).collect());
    Ok(())
}

fn loss(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let snr = "sd-scripts stops, it has no ratio of noise to signal for these models; here it is that of flow matching";
    loss::write_pseudo_huber(mapping, snr)?;
    if family == ForeignFamily::Flux {
        timesteps::write(mapping, "uniform", 3.0)?;
        mapping.number("guidance_scale", "train.guidance_scale", 3.5)?;
        if mapping.config.text("model_prediction_type")?.as_deref() != Some("raw") {
            let why = "the model's output is compared with the velocity as it is, which kohya calls `raw`";
            mapping.differs("model_prediction_type", why);
        }
        return Ok(());
    }
    // Its loss has the weight σ², which this scheme takes back.
    if mapping.config.text("weighting_scheme")?.as_deref() == Some("sigma_sqrt") {
        mapping.set(
            "train.weighting_scheme",
            "uniform",
            "weighting_scheme, with the weight σ² of kohya's SD3",
        );
    } else {
        let from = "the loss of x, as kohya trains SD3";
        mapping.set_default("train.loss_weighting", "sigma_squared", from);
        timesteps::weighting(mapping, "uniform")?;
    }
    if mapping.value("train.huber_c").is_some() {
        let why = "the threshold is one of errors of the velocity, there of those of x";
        mapping.differs("huber_c", why);
    }
    if let Some(mean) =
        mapping.value("train.logit_mean").and_then(Value::as_f64).filter(|mean| *mean != 0.0)
    {
        mapping
            .differs("logit_mean", "drawn from the other end: here a mean above 0 is less noise");
        let line = mapping.lines.iter_mut().find(|line| line.key == "train.logit_mean");
        if let Some(line) = line {
            line.value = Value::from(-mean);
        }
    }
    mapping.number("training_shift", "train.timestep_shift", 1.0)?;
    Ok(())
}
