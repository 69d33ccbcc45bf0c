//! CLIP text encoders that another trainer trains with the model.

use serde_json::Value;

use super::mapping::Mapping;

/// A CLIP that is trained there.
pub(super) struct TrainedClip {
    /// Its name here.
    pub name: &'static str,
    /// The key that says that it is trained, or says nothing of it.
    pub from: &'static str,
    /// The key of its learning rate, and the rate, if it has one of its own.
    pub rate: Option<(&'static str, f64)>,
}

/// Taken: the linear layers of `CLIPAttention` and `CLIPMLP`, which trainers look for.
const LAYERS: [&str; 6] = ["q_proj", "k_proj", "v_proj", "out_proj", "fc1", "fc2"];

/// Optimizers that have one learning rate for all parameters.
const ONE_RATE: [&str; 2] = ["prodigy", "muon"];

/// Writes which are trained and how fast, after the adapter and the optimizer are written.
pub(super) fn write(mapping: &mut Mapping, mut clips: Vec<TrainedClip>) {
    // One with a learning rate of 0 stays as it is.
    clips.retain(|clip| clip.rate.is_none_or(|(_, rate)| rate > 0.0));
    let Some(&TrainedClip { from, .. }) = clips.first() else { return };
    let kind = mapping.value("adapter.kind").and_then(Value::as_str).unwrap_or("lora");
    if kind != "lora" {
        let why = format!(
            "text encoders are not trained: with hearth their layers have LoRA alone, not {kind}"
        );
        mapping.differs(from, why);
        return;
    }
    let names: Vec<&str> = clips.iter().map(|clip| clip.name).collect();
    let typed = mapping.config.peek(from).is_some().then(|| names.clone());
    mapping.set_or("adapter.text_encoders", typed, names, from);
    let targets = LAYERS.map(Value::from).to_vec();
    mapping.set_default("adapter.text_encoder_targets", targets, "CLIP's linear layers");
    let Some((rate_from, _)) = clips.iter().find_map(|clip| clip.rate) else { return };
    let optimizer = mapping.value("optimizer.kind").and_then(Value::as_str);
    if optimizer.is_some_and(|kind| ONE_RATE.contains(&kind)) {
        mapping.differs(rate_from, "the optimizer has one learning rate for all that is trained");
        return;
    }
    // What has no learning rate of its own has that of the model.
    let of_model = mapping.value("optimizer.learning_rate").and_then(Value::as_f64);
    let rate = |clip: &TrainedClip| clip.rate.map(|(_, rate)| rate).or(of_model);
    let Some(rates) = clips.iter().map(rate).collect::<Option<Vec<f64>>>() else { return };
    let is_one = rates.iter().all(|rate| *rate == rates[0]);
    let value = if is_one { Value::from(rates[0]) } else { Value::from(rates) };
    mapping.set("adapter.text_encoder_learning_rate", value, rate_from);
}
