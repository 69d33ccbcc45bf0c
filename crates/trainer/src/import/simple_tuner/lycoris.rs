//! `lycoris_config`: the file that says which of LyCORIS' algorithms is trained, and where.

use serde_json::Value;

use super::super::error::ImportError;
use super::super::mapping::Mapping;

const FROM: &str = "lycoris_config";

/// The largest rank of a job. A larger one stands for a whole matrix there.
const MOST_RANK: u64 = 4096;

pub(super) fn adapter(mapping: &mut Mapping) -> Result<(), ImportError> {
    let Some(document) = mapping.document(FROM)? else { return Err(mapping.config.missing(FROM)) };
    let root = &document.root;
    let algorithm = root.get("algo").and_then(Value::as_str).unwrap_or("lokr");
    match algorithm {
        "lokr" | "loha" => mapping.set("adapter.kind", algorithm, FROM),
        "lora" | "locon" => mapping.set("adapter.kind", "lora", FROM),
        other => {
            let why = format!("its algo is {other:?}, hearth has LoRA, DoRA, LoHa and LoKr");
            mapping.refuse(FROM, why);
            return Ok(());
        }
    }
    for key in ["lora_rank", "lora_alpha", "lora_dropout"] {
        if mapping.config.peek(key).is_some() {
            mapping.no_effect(key, "there neither: the file of `lycoris_config` says it");
        }
    }
    let number = |key: &str| root.get(key).and_then(Value::as_f64);
    let is_on = |key: &str| root.get(key).and_then(Value::as_bool) == Some(true);
    let rank = number("linear_dim").unwrap_or(16.0) as u64;
    if algorithm == "lokr" && (is_on("full_matrix") || rank > MOST_RANK) {
        mapping.set("adapter.full_matrix", true, FROM);
    } else {
        mapping.set("adapter.rank", rank, FROM);
        mapping.set("adapter.alpha", number("linear_alpha").unwrap_or(rank as f64), FROM);
    }
    if let Some(factor) = number("factor").filter(|factor| algorithm == "lokr" && *factor > 0.0) {
        mapping.set("adapter.factor", factor as u64, FROM);
    }
    if is_on("use_scalar") || root.get("apply_preset").is_some_and(has_algorithms) {
        let why = "all layers have the algorithm and factor that the file begins with";
        mapping.differs(FROM, why);
    }
    let targets = root.get("apply_preset").and_then(|preset| preset.get("target_module"));
    let has = |names: &[&str]| {
        let names: Vec<Value> = names.iter().map(|name| Value::from(*name)).collect();
        targets.and_then(Value::as_array).is_some_and(|all| names.iter().all(|it| all.contains(it)))
    };
    // FLUX.2 has classes of its own.
    let is_blocks = has(&["Flux2TransformerBlock", "Flux2SingleTransformerBlock"]);
    let has_attention =
        has(&["Attention"]) || has(&["Flux2Attention", "Flux2ParallelSelfAttention"]);
    let has_feed_forward = has(&["FeedForward"]) || has(&["Flux2FeedForward"]);
    match (targets.is_some(), is_blocks || has_attention, is_blocks || has_feed_forward) {
        (true, true, false) => mapping.set("adapter.targets", "attention", FROM),
        (true, false, _) => {
            mapping.refuse(FROM, "layers are chosen by name: write adapter.targets into the job");
        }
        _ => mapping.set("adapter.targets", "all", FROM),
    }
    Ok(())
}

/// Whether some modules have an algorithm or factor of their own.
fn has_algorithms(preset: &Value) -> bool {
    ["module_algo_map", "name_algo_map"]
        .iter()
        .any(|key| preset.get(key).and_then(Value::as_object).is_some_and(|map| !map.is_empty()))
}
