//! The flags that both trainers share.

use serde_json::Value;

use super::super::data_folder;
use super::super::error::ImportError;
use super::super::mapping::Mapping;
use super::super::optimization::{self, AdamKeys, ScheduleDefaults, ScheduleKeys, TORCH_ADAMW};
use super::super::precision;
use super::super::prompts::{self, SampleDefaults, SampleNumber, SamplePrompt};

/// The base in parts: a checkpoint, its VAE and its text encoders.
pub(super) fn base(
    mapping: &mut Mapping,
    checkpoint: &str,
    vae: &str,
    encoders: &[&str],
) -> Result<(), ImportError> {
    mapping.base(checkpoint)?;
    if let Some(path) = mapping.config.text(vae)? {
        let path = mapping.places.written(&path);
        mapping.set("base.vae", path, vae);
    }
    let mut paths = Vec::new();
    for key in encoders {
        if let Some(path) = mapping.config.text(key)? {
            paths.push(mapping.places.written(&path));
        }
    }
    if !paths.is_empty() {
        mapping.set("base.text_encoders", paths, &encoders.join(", "));
        let why = "its tokenizers, which kohya downloads: give base.rest a diffusers folder of the model, or one with them";
        mapping.needs(checkpoint, why);
    }
    Ok(())
}

/// Precision of the base.
pub(super) fn precision(mapping: &mut Mapping, is_full: bool) -> Result<(), ImportError> {
    precision::write_dtype(mapping, "mixed_precision", "no")?;
    if is_full {
        if mapping.config.flag("full_bf16")? == Some(true) {
            mapping.set("train.weight_dtype", "bf16", "full_bf16");
        }
        if mapping.config.flag("fused_backward_pass")? == Some(true) {
            mapping.set("train.fused_backward_pass", true, "fused_backward_pass");
        }
        return Ok(());
    }
    let mut from = "fp8_base";
    for key in ["fp8_base", "fp8_base_unet", "fp8_scaled"] {
        if mapping.config.flag(key)? == Some(true) {
            from = key;
        }
    }
    let is_fp8 = mapping.config.is_on(from);
    precision::write_quantisation(mapping, "base.quantise", is_fp8.then_some("fp8"), from);
    let mut encoders = None;
    for key in ["fp8_vl", "fp8_t5", "fp8_llm", "fp8_text_encoder"] {
        if mapping.config.flag(key)? == Some(true) {
            encoders = Some(key);
        }
    }
    let from = encoders.unwrap_or("text encoders");
    precision::write_quantisation(mapping, "base.quantise_encoders", encoders.map(|_| "fp8"), from);
    Ok(())
}

/// Rank and alpha, which is 1 if nothing is said.
pub(super) fn network(mapping: &mut Mapping) -> Result<(), ImportError> {
    let is_lycoris = lycoris(mapping)?;
    if mapping.value("adapter.full_matrix").is_none() {
        mapping.whole("network_dim", "adapter.rank", 4)?;
        mapping.number("network_alpha", "adapter.alpha", 1.0)?;
    }
    if let Some(dropout) = mapping.config.number("network_dropout")?.filter(|it| *it > 0.0) {
        if is_lycoris {
            mapping.differs("network_dropout", "LyCORIS' LoHa and LoKr ignore it too");
        } else {
            mapping.set("adapter.dropout", dropout, "network_dropout");
        }
    }
    let key = ["network_args.loraplus_lr_ratio", "network_args.loraplus_unet_lr_ratio"]
        .into_iter()
        .find(|key| mapping.config.peek(key).is_some());
    if let Some(key) = key
        && let Some(ratio) = mapping.config.number(key)?
    {
        mapping.set("adapter.loraplus_lr_ratio", ratio, key);
    }
    Ok(())
}

/// Whether a network module is one of LyCORIS' algorithms.
pub(super) fn is_lycoris(module: &str) -> bool {
    matches!(module, "lycoris.kohya" | "networks.loha" | "networks.lokr")
}

/// LyCORIS' algorithm and its settings; answers whether it is LoHa or LoKr.
fn lycoris(mapping: &mut Mapping) -> Result<bool, ImportError> {
    let module = mapping.config.text("network_module")?;
    if !module.as_deref().is_some_and(is_lycoris) {
        return Ok(false);
    }
    let algorithm = match module.as_deref() {
        Some("networks.loha") => Some("loha".to_owned()),
        Some("networks.lokr") => Some("lokr".to_owned()),
        _ => mapping.config.text("network_args.algo")?,
    };
    let from = if mapping.config.peek("network_args.algo").is_some() {
        "network_args.algo"
    } else {
        "network_module"
    };
    match algorithm.as_deref() {
        // What LyCORIS does if nothing is said.
        None | Some("lora" | "locon") => {}
        Some(kind @ ("loha" | "lokr")) => mapping.set("adapter.kind", kind, from),
        Some(_) => mapping.refuse(from, "hearth has LoRA, DoRA, LoHa and LoKr"),
    }
    if mapping.config.flag("network_args.rs_lora")? == Some(true) {
        mapping.set("adapter.rslora", true, "network_args.rs_lora");
    }
    if mapping.config.is_on("network_args.dora_wd") {
        mapping.refuse(
            "network_args.dora_wd",
            "hearth has DoRA of LoRA alone: adapter.kind = \"dora\"",
        );
    }
    if algorithm.as_deref() == Some("lokr") {
        let factor = mapping.config.number("network_args.factor")?;
        if let Some(factor) = factor.filter(|factor| *factor > 0.0) {
            mapping.set("adapter.factor", factor as u64, "network_args.factor");
        }
        for (from, key) in [
            ("network_args.full_matrix", "adapter.full_matrix"),
            ("network_args.decompose_both", "adapter.decompose_both"),
        ] {
            if mapping.config.flag(from)? == Some(true) {
                mapping.set(key, true, from);
            }
        }
    }
    Ok(matches!(algorithm.as_deref(), Some("loha" | "lokr")))
}

/// How long, and in what batches.
pub(super) fn length(mapping: &mut Mapping) -> Result<(), ImportError> {
    match mapping.config.whole("max_train_epochs")? {
        Some(epochs) => {
            mapping.set("train.epochs", epochs, "max_train_epochs");
            if mapping.config.value("max_train_steps").is_some() {
                mapping.no_effect("max_train_steps", "`max_train_epochs` overrides it");
            }
        }
        None => _ = mapping.whole("max_train_steps", "train.steps", 1600)?,
    }
    mapping.whole("gradient_accumulation_steps", "train.gradient_accumulation", 1)?;
    mapping.limit("max_grad_norm", "train.max_grad_norm", 1.0)?;
    if let Some(seed) = mapping.config.whole("seed")? {
        mapping.set("train.seed", seed, "seed");
    }
    Ok(())
}

/// Optimizer and schedule.
pub(super) fn optimizer(mapping: &mut Mapping) -> Result<(), ImportError> {
    let is_8bit = mapping.config.flag("use_8bit_adam")? == Some(true);
    let is_lion = mapping.config.flag("use_lion_optimizer")? == Some(true);
    let default = match (is_8bit, is_lion) {
        (true, _) => "AdamW8bit",
        (false, true) => "Lion",
        (false, false) => "AdamW",
    };
    optimization::write_kind(mapping, "optimizer_type", default)?;
    let from = if mapping.config.is_on("unet_lr") { "unet_lr" } else { "learning_rate" };
    mapping.number(from, "optimizer.learning_rate", 2e-6)?;
    if from == "unet_lr" && mapping.config.peek("learning_rate").is_some() {
        mapping.no_effect("learning_rate", "`unet_lr` is that of the transformer");
    }
    let keys = AdamKeys {
        betas: &["optimizer_args.betas"],
        epsilon: "optimizer_args.eps",
        weight_decay: "optimizer_args.weight_decay",
        others: "optimizer_args.",
    };
    optimization::write_settings(mapping, &keys, TORCH_ADAMW)?;
    let keys = ScheduleKeys {
        name: "lr_scheduler",
        warmup: "lr_warmup_steps",
        cycles: "lr_scheduler_num_cycles",
        power: "lr_scheduler_power",
    };
    let default = ScheduleDefaults { name: "constant", warmup: 0.0, power: 1.0 };
    optimization::write_schedule(mapping, &keys, default)
}

/// The range of timesteps. Where it does not keep the shape, the whole distribution is squeezed into it there.
pub(super) fn timestep_range(mapping: &mut Mapping) -> Result<(), ImportError> {
    let is_kept = mapping.config.flag("preserve_distribution_shape")? == Some(true);
    for (from, key, all) in [
        ("min_timestep", "train.timestep_min", 0.0),
        ("max_timestep", "train.timestep_max", 1000.0),
    ] {
        let Some(number) = mapping.config.number(from)?.filter(|number| *number != all) else {
            continue;
        };
        mapping.set(key, number, from);
        if !is_kept {
            let why =
                "timesteps outside are drawn again, which keeps the shape of their distribution";
            mapping.differs(from, why);
        }
    }
    Ok(())
}

/// What kohya draws if a prompt does not say (`sample_images` of each trainer).
pub(super) fn samples(
    mapping: &mut Mapping,
    default: SampleDefaults<'_>,
) -> Result<(), ImportError> {
    let mut from = "sample_every_n_steps";
    let mut every = mapping.config.number(from)?;
    if let Some(epochs) = mapping.config.whole("sample_every_n_epochs")? {
        from = "sample_every_n_epochs";
        every = data_folder::steps_of_epochs(mapping, from, epochs).map(|steps| steps as f64);
    }
    let path = mapping.config.peek("sample_prompts").and_then(Value::as_str).unwrap_or_default();
    if !path.is_empty() && path.strip_suffix(".txt").is_none() {
        mapping.differs(
            "sample_prompts",
            "prompts are read from a .txt; write them into sample.prompts",
        );
        return Ok(());
    }
    let Some(text) = mapping.text_file("sample_prompts")? else { return Ok(()) };
    let lines =
        text.lines().map(str::trim).filter(|line| !line.is_empty() && !line.starts_with('#'));
    let prompts: Vec<SamplePrompt> = lines.map(SamplePrompt::parse).collect();
    let every = SampleNumber::of(every, from);
    prompts::write(mapping, &prompts, SampleDefaults { from: "sample_prompts", every, ..default });
    Ok(())
}

/// Folder, name, checkpoints, format.
pub(super) fn output(mapping: &mut Mapping) -> Result<(), ImportError> {
    mapping.path("output_dir", "output.folder")?;
    if let Some(name) = mapping.config.text("output_name")? {
        mapping.set("output.name", name, "output_name");
    }
    let mut every = mapping.config.whole("save_every_n_steps")?;
    let mut from = "save_every_n_steps";
    if let Some(epochs) = mapping.config.whole("save_every_n_epochs")? {
        from = "save_every_n_epochs";
        every = every.or(data_folder::steps_of_epochs(mapping, from, epochs));
    }
    if let Some(every) = every {
        mapping.set("output.save_every", every, from);
    }
    if let Some(keep) = mapping.config.whole("save_last_n_epochs")? {
        mapping.set("output.keep", keep.max(1), "save_last_n_epochs");
    } else if let (Some(steps), Some(every)) = (mapping.config.whole("save_last_n_steps")?, every) {
        let from = "save_last_n_steps / save_every_n_steps";
        mapping.set("output.keep", (steps / every.max(1)).max(1), from);
    }
    // q, k and v are one in kohya's files, and no Kronecker product.
    let is_lokr = mapping.value("adapter.kind").is_some_and(|kind| kind == "lokr");
    let format = if is_lokr { "comfyui" } else { "kohya" };
    mapping.set_default("output.formats", vec![format], "its own format");
    for (from, key) in
        [("metadata_author", "output.author"), ("metadata_license", "output.license")]
    {
        if let Some(text) = mapping.config.text(from)? {
            mapping.set(key, text, from);
        }
    }
    Ok(())
}
