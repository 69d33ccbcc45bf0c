//! ai-toolkit's YAML: one process with its sections. Read in `toolkit/config_modules.py` of
//! <https://github.com/ostris/ai-toolkit/tree/27a03a91>, whose defaults are those below.

mod rules;
mod timesteps;

use serde_json::Value;

use super::ForeignTrainer;
use super::data_folder::{self, DatasetEntry};
use super::document::Document;
use super::error::ImportError;
use super::family::{self, ForeignFamily, TRAINED, Z_IMAGE_DE_TURBO, Z_IMAGE_TURBO};
use super::foreign::ForeignConfig;
use super::mapping::Mapping;
use super::optimization::{self, AdamDefaults, AdamKeys, TORCH_ADAMW};
use super::precision;
use super::prompts::{self, GuidanceKind, SampleDefaults, SampleNumber, SamplePrompt};
use super::text_encoders::{self, TrainedClip};
use super::training_adapter;

pub(super) const TRAINER: ForeignTrainer = ForeignTrainer {
    name: "ai-toolkit",
    told_by: "`config.process` with a `model`",
    recognises: |document| document.root["config"]["process"][0]["model"].is_object(),
    keys: |document| Ok(keys(document)),
    map,
    rules: &[rules::RULES],
};

/// The keys of the process are those that the documentation names; what stands around it keeps its whole name.
fn keys(document: &Document) -> ForeignConfig {
    let mut root = document.root.clone();
    let process = root["config"]["process"].take();
    let parts = process.as_array().cloned().unwrap_or_default();
    if let Some(config) = root["config"].as_object_mut() {
        config.remove("process");
    }
    let mut config = ForeignConfig::new(&document.path, &root);
    for (index, part) in parts.iter().enumerate() {
        config.add(&if index == 0 { String::new() } else { format!("process[{index}]") }, part);
    }
    config
}

fn map(mapping: &mut Mapping) -> Result<(), ImportError> {
    let Some(family) = model(mapping)? else { return Ok(()) };
    data(mapping)?;
    network(mapping, family)?;
    training_adapter(mapping)?;
    train(mapping, family)?;
    timesteps::write(mapping, family)?;
    optimizer(mapping)?;
    text_encoders(mapping, family)?;
    sample(mapping, family)?;
    output(mapping)?;
    if mapping.lines.iter().any(|line| line.key == "data.trigger") {
        let why = "`[trigger]` within captions stays as it is: the word is put before captions that lack it";
        mapping.differs("trigger_word", why);
    }
    Ok(())
}

fn model(mapping: &mut Mapping) -> Result<Option<ForeignFamily>, ImportError> {
    let arch = mapping.config.text("model.arch")?;
    let arch = arch.as_deref().map(|arch| arch.split(':').next().unwrap_or(arch).to_owned());
    let is = |mapping: &mut Mapping, key| mapping.config.flag(key).map(Option::unwrap_or_default);
    let is_flux = is(mapping, "model.is_flux")?;
    let is_sd3 = is(mapping, "model.is_v3")?;
    let family = match arch.as_deref() {
        Some("flux" | "flux_kontext") => Some(ForeignFamily::Flux),
        Some("sd3") => Some(ForeignFamily::Sd3),
        Some("qwen_image" | "qwen_image_edit" | "qwen_image_edit_plus") => {
            Some(ForeignFamily::QwenImage)
        }
        Some("zimage") => Some(ForeignFamily::ZImage),
        Some("flux2_klein_4b" | "flux2_klein_9b") => Some(ForeignFamily::Flux2Klein),
        None if is_flux => Some(ForeignFamily::Flux),
        None if is_sd3 => Some(ForeignFamily::Sd3),
        _ => None,
    };
    let Some(family) = family else {
        mapping.refuse("model.arch", TRAINED);
        return Ok(None);
    };
    base(mapping, family)?;
    precision::write_dtype(mapping, "train.dtype", "fp32")?;
    let is_quantised = is(mapping, "model.quantize")?;
    let format = mapping.config.text("model.qtype")?.unwrap_or_else(|| "qfloat8".into());
    let from = if is_quantised { "model.qtype" } else { "model.quantize" };
    precision::write_quantisation(mapping, "base.quantise", is_quantised.then_some(&format), from);
    let is_quantised = mapping.config.flag("model.quantize_te")?.unwrap_or(is_quantised);
    let format = mapping.config.text("model.qtype_te")?.unwrap_or_else(|| "qfloat8".into());
    let format = is_quantised.then_some(format.as_str());
    precision::write_quantisation(mapping, "base.quantise_encoders", format, "model.qtype_te");
    Ok(Some(family))
}

/// Of Z-Image a transformer alone may be given, whose other parts are those of another model.
fn base(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let (from, rest_from) = ("model.name_or_path", "model.extras_name_or_path");
    let typed = mapping.config.text(from)?.ok_or_else(|| mapping.config.missing(from))?;
    if family != ForeignFamily::ZImage {
        return mapping.base(from).map(drop);
    }
    let is_de_turbo = typed == "ostris/Z-Image-De-Turbo";
    if is_de_turbo {
        mapping.set("base.path", Z_IMAGE_DE_TURBO, from);
    } else {
        mapping.base(from)?;
    }
    let rest = mapping.config.text(rest_from)?.filter(|rest| *rest != typed);
    if rest.is_some() || is_de_turbo || typed.ends_with(".safetensors") {
        let path = mapping.places.model(rest.as_deref().unwrap_or(Z_IMAGE_TURBO));
        mapping.set_or("base.rest", rest.map(|_| path.clone()), path, rest_from);
    }
    Ok(())
}

/// An adapter that is merged into the base for training, and taken out for samples.
fn training_adapter(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "model.assistant_lora_path";
    if let Some(path) = mapping.config.text(from)? {
        let path = mapping.places.model_file(&path);
        training_adapter::write(mapping, &path, from);
    }
    Ok(())
}

fn data(mapping: &mut Mapping) -> Result<(), ImportError> {
    let n_datasets = mapping.config.count("datasets");
    for index in 0..n_datasets {
        let entry = entry(mapping, index)?;
        data_folder::begin(mapping, &entry);
        captions(mapping, index)?;
        masks(mapping, index)?;
        references(mapping, index)?;
    }
    match n_datasets {
        0 => Err(mapping.config.missing("datasets")),
        _ => Ok(()),
    }
}

fn key(index: usize, name: &str) -> String {
    format!("datasets[{index}].{name}")
}

fn entry(mapping: &mut Mapping, index: usize) -> Result<DatasetEntry, ImportError> {
    let key = |name| key(index, name);
    let has_folder = mapping.config.peek(&key("folder_path")).is_some();
    let from = key(if has_folder { "folder_path" } else { "dataset_path" });
    let folder = mapping.config.text(&from)?.ok_or_else(|| mapping.config.missing(&from))?;
    let sides = mapping.config.numbers(&key("resolution"))?;
    let repeats = mapping.config.number(&key("num_repeats"))?.unwrap_or(1.0);
    Ok(DatasetEntry {
        folder,
        from,
        repeats,
        repeats_from: key("num_repeats"),
        has_sides: !sides.is_empty(),
        sides: if sides.is_empty() { vec![512.0] } else { sides },
        sides_from: key("resolution"),
    })
}

fn captions(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let key = |name| key(index, name);
    mapping.number(&key("caption_dropout_rate"), "data.caption_dropout", 0.0)?;
    if mapping.config.flag(&key("shuffle_tokens"))? == Some(true) {
        mapping.set("data.shuffle_tags", true, &key("shuffle_tokens"));
        mapping.whole(&key("keep_tokens"), "data.keep_tags", 0)?;
    }
    if mapping.config.flag(&key("flip_x"))? == Some(true) {
        mapping.set("data.flip", true, &key("flip_x"));
    }
    if mapping.config.flag(&key("random_crop"))? == Some(true) {
        mapping.set("data.crop", "random", &key("random_crop"));
    }
    let weight = mapping.config.number(&key("loss_multiplier"))?;
    if let Some(weight) = weight.filter(|weight| *weight != 1.0) {
        mapping.set("data.loss_weight", weight, &key("loss_multiplier"));
    }
    if mapping.config.flag(&key("is_reg"))? == Some(true) {
        mapping.set("data.regularisation", true, &key("is_reg"));
        mapping.leave_out(&["data.repeats"]);
    }
    if mapping.config.flag(&key("prior_reg"))? == Some(true) {
        mapping.set("data.target", "base", &key("prior_reg"));
    }
    let extension = mapping.config.text(&key("caption_ext"))?.unwrap_or_else(|| "txt".into());
    if !["txt", "caption"].contains(&extension.trim_start_matches('.')) {
        mapping.refuse(&key("caption_ext"), "captions are read from .txt and .caption");
    }
    for from in ["trigger_word".to_owned(), key("trigger_word")] {
        if let Some(trigger) = mapping.config.text(&from)? {
            mapping.set("data.trigger", trigger, &from);
        }
    }
    Ok(())
}

fn masks(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let key = |name| key(index, name);
    let is_alpha = mapping.config.flag(&key("alpha_mask"))? == Some(true);
    let folder = mapping.config.text(&key("mask_path"))?;
    if let Some(folder) = &folder {
        let folder = mapping.places.written(folder);
        mapping.set("data.masks", folder, &key("mask_path"));
    } else if is_alpha {
        mapping.set("data.masks", "alpha", &key("alpha_mask"));
    }
    let least = mapping.config.number(&key("mask_min_value"))?.filter(|least| *least > 0.0);
    if let Some(least) = least.filter(|_| is_alpha || folder.is_some()) {
        mapping.set("data.unmasked_weight", least, &key("mask_min_value"));
    }
    Ok(())
}

fn references(mapping: &mut Mapping, index: usize) -> Result<(), ImportError> {
    let mut paths = Vec::new();
    let mut first = None;
    for name in ["control_path", "control_path_1", "control_path_2", "control_path_3"] {
        let from = key(index, name);
        let typed = mapping.config.texts(&from)?;
        first = first.or((!typed.is_empty()).then(|| from.clone()));
        paths.extend(typed.iter().map(|path| mapping.places.written(path)));
    }
    if let Some(from) = first {
        mapping.set("data.references", paths, &from);
    }
    Ok(())
}

fn network(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let has_network = mapping.config.left_over().iter().any(|(key, _)| key.starts_with("network."));
    if !has_network {
        mapping.set_default("adapter.kind", "full", "network");
        return Ok(());
    }
    match mapping.config.text("network.type")?.as_deref().map(str::to_lowercase).as_deref() {
        None => mapping.set_default("adapter.kind", "lora", "network.type"),
        Some("lora") => mapping.set("adapter.kind", "lora", "network.type"),
        Some("dora") => mapping.set("adapter.kind", "dora", "network.type"),
        Some("lokr") => {
            lokr(mapping)?;
            return targets(mapping, family);
        }
        Some(_) => mapping.refuse("network.type", "hearth has LoRA, DoRA and LoKr"),
    }
    let from = if mapping.config.is_on("network.rank") { "network.rank" } else { "network.linear" };
    let rank = mapping.whole(from, "adapter.rank", 4)?;
    mapping.set_default("adapter.alpha", rank, "alpha is always the rank");
    for key in ["network.linear_alpha", "network.alpha"] {
        if mapping.config.peek(key).is_some() {
            mapping
                .no_effect(key, "there neither: ai-toolkit trains transformers with alpha = rank");
        }
    }
    if let Some(dropout) = mapping.config.number("network.dropout")? {
        mapping.set("adapter.dropout", dropout, "network.dropout");
    }
    targets(mapping, family)
}

/// Its inner factor is whole unless told otherwise, and has no rank then.
fn lokr(mapping: &mut Mapping) -> Result<(), ImportError> {
    mapping.set("adapter.kind", "lokr", "network.type");
    if let Some(factor) = mapping.config.number("network.lokr_factor")?.filter(|it| *it > 0.0) {
        mapping.set("adapter.factor", factor as u64, "network.lokr_factor");
    }
    let is_full = mapping.config.flag("network.lokr_full_rank")?;
    if is_full.unwrap_or(true) {
        mapping.set_or("adapter.full_matrix", is_full, true, "network.lokr_full_rank");
        for key in ["network.linear", "network.linear_alpha", "network.rank", "network.alpha"] {
            if mapping.config.peek(key).is_some() {
                mapping.no_effect(key, "there neither, with `lokr_full_rank`");
            }
        }
    } else {
        let rank = mapping.whole("network.linear", "adapter.rank", 4)?;
        mapping.set_default("adapter.alpha", rank, "alpha is always the rank");
        if mapping.config.peek("network.linear_alpha").is_some() {
            let why = "there neither: ai-toolkit trains transformers with alpha = rank";
            mapping.no_effect("network.linear_alpha", why);
        }
    }
    if mapping.config.is_on("network.dropout") {
        mapping.differs("network.dropout", "hearth's LoKr has no dropout");
    }
    Ok(())
}

fn targets(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    if family == ForeignFamily::Flux2Klein {
        family::tell_fused(mapping, "network");
        for name in ["only_if_contains", "ignore_if_contains"] {
            let from = format!("network.network_kwargs.{name}");
            if mapping.config.is_on(&from) {
                let why =
                    "layers of FLUX.2 have other names here: write adapter.targets into the job";
                mapping.refuse(&from, why);
            }
        }
    }
    let pattern =
        |part: &String| format!("*{}*", part.strip_prefix("transformer.").unwrap_or(part));
    let from = "network.network_kwargs.only_if_contains";
    let only: Vec<String> = mapping.config.texts(from)?.iter().map(pattern).collect();
    if only.is_empty() {
        mapping.set_default(
            "adapter.targets",
            family.all_layers(),
            "all linear layers of the blocks",
        );
    } else {
        mapping.set("adapter.targets", only, from);
    }
    let from = "network.network_kwargs.ignore_if_contains";
    let ignored: Vec<String> = mapping.config.texts(from)?.iter().map(pattern).collect();
    if !ignored.is_empty() {
        mapping.set("adapter.exclude", ignored, from);
    }
    Ok(())
}

fn train(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let steps = mapping.config.whole("train.steps")?;
    let (old, new) = ("train.gradient_accumulation_steps", "train.gradient_accumulation");
    let accumulated = mapping.config.whole(old)?.unwrap_or(1).max(1);
    let more = mapping.config.whole(new)?.unwrap_or(1).max(1);
    // Every batch counts as a step there, with the older of the two keys.
    let is_old = accumulated > 1;
    let from = if is_old { format!("train.steps / {old}") } else { "train.steps".into() };
    let optimizer_steps = (steps.unwrap_or(1000) / accumulated).max(1);
    mapping.set_or("train.steps", steps.map(|_| optimizer_steps), optimizer_steps, &from);
    mapping.whole("train.batch_size", "train.batch_size", 1)?;
    if accumulated.saturating_mul(more) > 1 {
        let from = if is_old { old } else { new };
        mapping.set("train.gradient_accumulation", accumulated.saturating_mul(more), from);
    }
    if let Some(seed) = mapping.config.whole("training_seed")? {
        mapping.set("train.seed", seed, "training_seed");
    }
    mapping.limit("train.max_grad_norm", "train.max_grad_norm", 1.0)?;
    if mapping.config.flag("train.ema_config.use_ema")? == Some(true) {
        mapping.number("train.ema_config.ema_decay", "train.ema", 0.999)?;
    } else {
        mapping.config.value("train.ema_config.ema_decay");
    }
    let is_bypassed = mapping.config.flag("train.bypass_guidance_embedding")? == Some(true);
    let scale = mapping.config.number("train.cfg_scale")?;
    if family == ForeignFamily::Flux {
        if is_bypassed {
            mapping.set("train.guidance_scale", "off", "train.bypass_guidance_embedding");
        } else {
            mapping.set_or("train.guidance_scale", scale, 1.0, "train.cfg_scale");
        }
    }
    Ok(())
}

/// Its `AdamW` has another epsilon than torch's.
const ADAMW: AdamDefaults = AdamDefaults { epsilon: 1e-6, ..TORCH_ADAMW };

fn text_encoders(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let (from, rate_from) = ("train.train_text_encoder", "train.text_encoder_lr");
    if mapping.config.flag(from)? != Some(true) {
        return Ok(());
    }
    let names: &[&'static str] = match family {
        ForeignFamily::Flux => &["clip-l"],
        ForeignFamily::Sd3 => &["clip-l", "clip-g"],
        _ => {
            mapping.refuse(
                from,
                "of text encoders CLIP's alone can be trained, which this model has not",
            );
            return Ok(());
        }
    };
    let rate = mapping.config.number(rate_from)?.map(|rate| (rate_from, rate));
    // `unet_lr` is the transformer's alone.
    let is_apart = mapping.config.is_on("train.unet_lr");
    let of_all =
        mapping.config.number("train.lr")?.filter(|_| is_apart).map(|rate| ("train.lr", rate));
    let rate = rate.or(of_all);
    text_encoders::write(
        mapping,
        names.iter().map(|name| TrainedClip { name, from, rate }).collect(),
    );
    Ok(())
}

fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    optimization::write_kind(mapping, "train.optimizer", "adamw")?;
    let from = if mapping.config.is_on("train.unet_lr") { "train.unet_lr" } else { "train.lr" };
    mapping.number(from, "optimizer.learning_rate", 1e-6)?;
    let keys = AdamKeys {
        betas: &["train.optimizer_params.betas"],
        epsilon: "train.optimizer_params.eps",
        weight_decay: "train.optimizer_params.weight_decay",
        others: "train.optimizer_params.",
    };
    optimization::write_settings(mapping, &keys, ADAMW)?;
    schedule(mapping)
}

/// Its names are those of torch's schedulers, not of diffusers'.
fn schedule(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "train.lr_scheduler";
    let typed = mapping.config.text(from)?;
    let (warmup_from, mut warmup) = ("train.lr_scheduler_params.num_warmup_steps", None);
    let schedule = match typed.as_deref().unwrap_or("constant") {
        "constant" => "constant",
        "constant_with_warmup" => {
            warmup = Some(1000);
            "constant"
        }
        "cosine" | "cosine_with_restarts" => "cosine",
        "linear" => {
            mapping.differs(from, "torch's LinearLR rises from a third of the rate to all of it; here the rate is constant");
            "constant"
        }
        _ => {
            mapping.differs(
                from,
                "hearth has constant, linear, cosine, plateau and wsd; the rate stays constant",
            );
            "constant"
        }
    };
    mapping.set_or("optimizer.lr_scheduler", typed.map(|_| schedule), schedule, from);
    if let Some(default) = warmup {
        mapping.whole(warmup_from, "optimizer.warmup_steps", default)?;
    }
    Ok(())
}

fn sample(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let trigger =
        mapping.value("data.trigger").and_then(Value::as_str).unwrap_or_default().to_owned();
    let mut prompts: Vec<SamplePrompt> = mapping
        .config
        .texts("sample.prompts")?
        .iter()
        .map(|line| SamplePrompt::parse(line))
        .collect();
    let mut from = "sample.prompts";
    for index in 0..mapping.config.count("sample.samples") {
        from = "sample.samples";
        prompts.push(sample_item(mapping, index)?);
    }
    let negative =
        mapping.config.value("sample.neg").and_then(|value| value.as_str().map(str::to_owned));
    for prompt in &mut prompts {
        prompt.text = prompt.text.replace("[trigger]", &trigger);
        prompt.negative = prompt.negative.take().or(negative.clone());
    }
    let is_flux = family == ForeignFamily::Flux;
    let scale = number(mapping, "sample.guidance_scale", 7.0)?;
    let defaults = SampleDefaults {
        from,
        every: number(mapping, "sample.sample_every", 100.0)?,
        width: number(mapping, "sample.width", 512.0)?,
        height: number(mapping, "sample.height", 512.0)?,
        steps: number(mapping, "sample.sample_steps", 20.0)?,
        cfg_scale: if is_flux { SampleNumber::of(None, "") } else { scale },
        guidance: scale,
        seed: number(mapping, "sample.seed", 0.0)?,
        kind: GuidanceKind::of(family),
    };
    if mapping.config.flag("train.disable_sampling")? == Some(true) {
        prompts.clear();
    }
    prompts::write(mapping, &prompts, defaults);
    Ok(())
}

fn number<'a>(
    mapping: &mut Mapping,
    from: &'a str,
    default: f64,
) -> Result<SampleNumber<'a>, ImportError> {
    let typed = mapping.config.number(from)?;
    Ok(if typed.is_some() {
        SampleNumber::of(typed, from)
    } else {
        SampleNumber::unless_said(default)
    })
}

fn sample_item(mapping: &mut Mapping, index: usize) -> Result<SamplePrompt, ImportError> {
    let key = |name: &str| format!("sample.samples[{index}].{name}");
    let text = mapping.config.text(&key("prompt"))?.unwrap_or_default();
    let mut prompt = SamplePrompt {
        negative: mapping.config.text(&key("neg"))?,
        width: mapping.config.number(&key("width"))?,
        height: mapping.config.number(&key("height"))?,
        seed: mapping.config.number(&key("seed"))?,
        steps: mapping.config.number(&key("sample_steps"))?,
        cfg_scale: mapping.config.number(&key("guidance_scale"))?,
        ..SamplePrompt::parse(&text)
    };
    for name in ["ctrl_img", "ctrl_img_1", "ctrl_img_2", "ctrl_img_3"] {
        prompt.references.extend(mapping.config.text(&key(name))?);
    }
    Ok(prompt)
}

fn output(mapping: &mut Mapping) -> Result<(), ImportError> {
    let name = mapping.config.text("config.name")?;
    let folder = mapping.config.text("training_folder")?.unwrap_or_else(|| "output".into());
    let folder = match &name {
        Some(name) => format!("{folder}/{name}"),
        None => folder,
    };
    let folder = mapping.places.written(&folder);
    mapping.set("output.folder", folder, "training_folder, config.name");
    if let Some(name) = name {
        mapping.set("output.name", name, "config.name");
    }
    mapping.whole("save.save_every", "output.save_every", 1000)?;
    mapping.whole("save.max_step_saves_to_keep", "output.keep", 5)?;
    Ok(())
}
