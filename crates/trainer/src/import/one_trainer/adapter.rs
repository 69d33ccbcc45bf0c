//! The adapter, and the layers that get one.

use super::super::error::ImportError;
use super::super::family::ForeignFamily;
use super::super::mapping::Mapping;

pub(super) fn write(
    mapping: &mut Mapping,
    family: ForeignFamily,
    is_full: bool,
) -> Result<(), ImportError> {
    if is_full {
        let typed = mapping.config.peek("training_method").map(|_| "full");
        mapping.set_or("adapter.kind", typed, "full", "training_method");
        return Ok(());
    }
    let typed = mapping.config.text("peft_type")?;
    if typed.as_deref() == Some("LOKR") {
        lokr(mapping)?;
    } else {
        low_rank(mapping, typed.as_deref())?;
    }
    dropout(mapping)?;
    targets(mapping, family)
}

fn low_rank(mapping: &mut Mapping, typed: Option<&str>) -> Result<(), ImportError> {
    let is_dora = mapping.config.flag("lora_decompose")? == Some(true);
    let (kind, from) = match typed {
        Some("LOHA") => ("loha", "peft_type"),
        _ if is_dora => ("dora", "lora_decompose"),
        _ => ("lora", "training_method"),
    };
    if !matches!(typed, None | Some("LORA" | "LOHA")) {
        mapping.refuse("peft_type", "hearth has OneTrainer's LoRA, DoRA, LoHa and LoKr");
    }
    mapping.set("adapter.kind", kind, from);
    mapping.whole("lora_rank", "adapter.rank", 16)?;
    mapping.number("lora_alpha", "adapter.alpha", 1.0)?;
    Ok(())
}

/// Its rank is a key of its own, its alpha that of all kinds; two whole matrices have neither.
fn lokr(mapping: &mut Mapping) -> Result<(), ImportError> {
    mapping.set("adapter.kind", "lokr", "peft_type");
    let is_both = mapping.config.flag("lokr_decompose_both")? == Some(true);
    if mapping.config.flag("lokr_full_matrix")? == Some(true) {
        mapping.set("adapter.full_matrix", true, "lokr_full_matrix");
        if is_both {
            mapping.differs(
                "lokr_decompose_both",
                "with a whole inner factor the outer one is whole too",
            );
        }
        for key in ["lokr_dim", "lora_alpha"] {
            if mapping.config.peek(key).is_some() {
                mapping.no_effect(key, "there neither, with `lokr_full_matrix`");
            }
        }
    } else {
        mapping.whole("lokr_dim", "adapter.rank", 16)?;
        mapping.number("lora_alpha", "adapter.alpha", 1.0)?;
        if is_both {
            mapping.set("adapter.decompose_both", true, "lokr_decompose_both");
        }
    }
    let factor = mapping.config.number("lokr_decompose_factor")?;
    if let Some(factor) = factor.filter(|factor| *factor > 0.0) {
        mapping.set("adapter.factor", factor as u64, "lokr_decompose_factor");
    }
    if mapping.config.is_on("lokr_weight_decompose") {
        mapping
            .refuse("lokr_weight_decompose", "hearth has DoRA of LoRA alone: `peft_type = LORA`");
    }
    if mapping.config.peek("lora_rank").is_some() {
        mapping.no_effect("lora_rank", "LoKr has `lokr_dim`");
    }
    Ok(())
}

fn dropout(mapping: &mut Mapping) -> Result<(), ImportError> {
    let from = "dropout_probability";
    let dropout = mapping.config.number(from)?.filter(|dropout| *dropout > 0.0);
    let Some(dropout) = dropout else { return Ok(()) };
    if mapping.value("adapter.kind").is_some_and(|kind| kind == "loha" || kind == "lokr") {
        mapping.differs(from, "hearth's LoHa and LoKr have no dropout");
    } else {
        mapping.set("adapter.dropout", dropout, from);
    }
    Ok(())
}

/// Layers by a preset, which stands above the filter that it fills in.
fn targets(mapping: &mut Mapping, family: ForeignFamily) -> Result<(), ImportError> {
    let preset_from = "layer_filter_preset";
    let preset = mapping.config.text(preset_from)?;
    let filter = mapping.config.text("layer_filter")?;
    if let Some(names) = preset.as_deref().and_then(|preset| of_preset(family, preset)) {
        mapping.config.value("layer_filter_regex");
        match names[..] {
            [word] => mapping.set("adapter.targets", word, preset_from),
            _ => mapping.set("adapter.targets", names, preset_from),
        }
        return Ok(());
    }
    if mapping.config.flag("layer_filter_regex")? == Some(true) {
        let why = "layers are chosen by name: write adapter.targets into the job";
        mapping.refuse("layer_filter_regex", why);
    }
    match (preset.as_deref(), &filter) {
        (None | Some("full"), None) => {
            let why =
                "layers of the blocks have an adapter, there those before and behind them too";
            mapping.differs(preset_from, why);
            mapping.set_default("adapter.targets", family.all_layers(), preset_from);
        }
        (_, Some(filter)) => {
            let names = filter.split(',').map(str::trim).filter(|name| !name.is_empty());
            let names: Vec<String> = names.map(|name| format!("*{name}*")).collect();
            mapping.set("adapter.targets", names, "layer_filter");
        }
        (Some(_), None) => mapping
            .refuse(preset_from, "hearth does not know it: write adapter.targets into the job"),
    }
    Ok(())
}

/// Z-Image's presets leave its refiners out.
fn of_preset(family: ForeignFamily, preset: &str) -> Option<Vec<&'static str>> {
    match (preset, family) {
        ("attn-only", ForeignFamily::ZImage) => Some(vec![
            "layers.*.attention.to_q",
            "layers.*.attention.to_k",
            "layers.*.attention.to_v",
            "layers.*.attention.to_out.0",
        ]),
        ("attn-mlp", ForeignFamily::ZImage) => Some(vec!["kohya"]),
        ("attn-only", _) => Some(vec!["attention"]),
        ("attn-mlp", _) => Some(vec!["all"]),
        ("blocks", _) => Some(vec![family.all_layers()]),
        _ => None,
    }
}
