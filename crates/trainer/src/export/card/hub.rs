//! What the Hugging Face hub calls a base, as far as its place on disk tells.

use std::path::Path;

use crate::model::diffusion::family::PublishedPipeline;

/// A model's name on the hub, as its cache calls the folder, or as its publisher does.
pub fn hub_name(base: &str) -> Option<String> {
    let parts = || base.split(['/', '\\']);
    if let Some(cached) = parts().find_map(|part| part.strip_prefix("models--")) {
        let is_name = |c: char| c.is_ascii_alphanumeric() || "-_.".contains(c);
        return cached.chars().all(is_name).then(|| cached.replacen("--", "/", 1));
    }
    let name = parts().next_back()?;
    let stem = name.trim_end_matches(".safetensors");
    PublishedPipeline::hub_name(stem).map(str::to_owned).or_else(|| language_model(name))
}

/// Whether a base is one GGUF file.
pub fn is_gguf(base: &str) -> bool {
    Path::new(base).extension().is_some_and(|kind| kind.eq_ignore_ascii_case("gguf"))
}

/// Language models, by who published them. Each is also there with an ending of [`TUNED`].
const LANGUAGE_MODELS: [(&str, &[&str]); 4] = [
    ("HuggingFaceTB", &["SmolLM2-135M", "SmolLM2-360M", "SmolLM2-1.7B"]),
    ("meta-llama", &["Llama-3.1-8B", "Llama-3.2-1B", "Llama-3.2-3B"]),
    ("mistralai", &["Mistral-7B-v0.3"]),
    (
        "Qwen",
        &[
            "Qwen2.5-0.5B",
            "Qwen2.5-1.5B",
            "Qwen2.5-3B",
            "Qwen2.5-7B",
            "Qwen3-0.6B",
            "Qwen3-1.7B",
            "Qwen3-4B",
            "Qwen3-8B",
        ],
    ),
];

/// What the tuned and the plain version of a model are told apart by.
const TUNED: [&str; 3] = ["", "-Instruct", "-Base"];

/// By the name of a folder, or of a GGUF file, which ends in the format of its numbers.
fn language_model(name: &str) -> Option<String> {
    let model = if is_gguf(name) { without_format(name) } else { name };
    let all =
        LANGUAGE_MODELS.iter().flat_map(|(by, names)| names.iter().map(move |name| (by, name)));
    let known = |(by, name): (&&str, &&str)| {
        let tuned = TUNED.iter().map(|ending| format!("{name}{ending}"));
        let found = tuned.into_iter().find(|name| name.eq_ignore_ascii_case(model))?;
        Some(format!("{by}/{found}"))
    };
    all.into_iter().find_map(known)
}

/// `SmolLM2-135M-Q8_0.gguf`, `smollm2-135m.f16.gguf`: the model's part.
fn without_format(file: &str) -> &str {
    let stem = &file[..file.len() - ".gguf".len()];
    let is_format = |word: &str| {
        let word = word.to_ascii_uppercase();
        ["F16", "BF16", "F32"].contains(&&word[..])
            || (word.starts_with('Q') || word.starts_with("IQ")) && word.contains('_')
    };
    match stem.rsplit_once(['-', '.']) {
        Some((model, format)) if is_format(format) => model,
        _ => stem,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_base_has_the_hubs_name_where_its_place_tells() {
        for (base, expected) in [
            ("cache/models--ada--my-sd3--v2/snapshots/0a1b", Some("ada/my-sd3--v2")),
            ("x\\sd3.5_large.safetensors", Some("stabilityai/stable-diffusion-3.5-large")),
            ("models--a)(b--c", None),
            ("models/SmolLM2-135M", Some("HuggingFaceTB/SmolLM2-135M")),
            ("smollm2-135m-instruct-q4_k_m.gguf", Some("HuggingFaceTB/SmolLM2-135M-Instruct")),
            ("Qwen3-4B.Q8_0.gguf", Some("Qwen/Qwen3-4B")),
            ("Qwen3-4B.gguf", Some("Qwen/Qwen3-4B")),
            ("Qwen3-4B-my-own", None),
            ("my-model-q8_0.gguf", None),
            (".gguf", None),
            ("", None),
        ] {
            assert_eq!(hub_name(base).as_deref(), expected, "{base}");
        }
    }
}
