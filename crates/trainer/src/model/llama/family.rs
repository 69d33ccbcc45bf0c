//! The families of language models, a line each: what files call them, and which layers an adapter may have.

use serde::{Deserialize, Serialize};

use crate::model::adapter::TargetPreset;

/// The family, which decides what configs leave out.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum LanguageFamily {
    /// Llama, and all models of its architecture.
    Llama,
    /// Mistral.
    Mistral,
    /// Qwen2: q, k and v have biases.
    Qwen2,
    /// Qwen3: queries and keys are normed.
    Qwen3,
    /// Qwen3 with experts.
    #[serde(rename = "qwen3_moe")]
    Qwen3Moe,
    /// Mistral with experts.
    Mixtral,
    /// Gemma 3, its text model: four norms in a block, most layers see a window only.
    #[serde(rename = "gemma3_text")]
    Gemma3,
    /// Phi-3, Phi-3.5 mini, Phi-4 and Phi-4-mini: q, k and v are one layer, and so are gate and up.
    Phi3,
}

use LanguageFamily::{Gemma3, Llama, Mistral, Mixtral, Phi3, Qwen2, Qwen3, Qwen3Moe};

/// What there is to know of a family by its name.
struct LanguageFamilyFacts {
    family: LanguageFamily,
    /// `model_type` in `config.json`.
    model_type: &'static str,
    /// The class in transformers.
    class: &'static str,
    /// The same of models that contain one of the family, beside a vision tower.
    containers: &'static [&'static str],
    /// `general.architecture` in GGUF files. Of several the first reads them.
    architecture: &'static str,
    target_presets: &'static [TargetPreset],
    /// The one that layers with an adapter are unless the job says otherwise.
    default_preset: &'static str,
}

const FAMILIES: [LanguageFamilyFacts; 8] = [
    facts(Llama, "llama", "LlamaForCausalLM", "llama", SEPARATE),
    facts(Mistral, "mistral", "MistralForCausalLM", "llama", SEPARATE),
    facts(Qwen2, "qwen2", "Qwen2ForCausalLM", "qwen2", SEPARATE),
    facts(Qwen3, "qwen3", "Qwen3ForCausalLM", "qwen3", SEPARATE),
    LanguageFamilyFacts {
        default_preset: "attention",
        ..facts(Qwen3Moe, "qwen3_moe", "Qwen3MoeForCausalLM", "qwen3moe", SEPARATE)
    },
    LanguageFamilyFacts {
        default_preset: "attention",
        ..facts(Mixtral, "mixtral", "MixtralForCausalLM", "llama", MIXTRAL)
    },
    LanguageFamilyFacts {
        containers: &["gemma3", "Gemma3ForConditionalGeneration"],
        ..facts(Gemma3, "gemma3_text", "Gemma3ForCausalLM", "gemma3", SEPARATE)
    },
    facts(Phi3, "phi3", "Phi3ForCausalLM", "phi3", FUSED),
];

const fn facts(
    family: LanguageFamily,
    model_type: &'static str,
    class: &'static str,
    architecture: &'static str,
    target_presets: &'static [TargetPreset],
) -> LanguageFamilyFacts {
    LanguageFamilyFacts {
        family,
        model_type,
        class,
        containers: &[],
        architecture,
        target_presets,
        default_preset: ALL_LAYERS,
    }
}

const ATTENTION: &[&str] = &["q_proj", "k_proj", "v_proj", "o_proj"];
const FEED_FORWARD: &[&str] = &["gate_proj", "up_proj", "down_proj"];
const FUSED_ATTENTION: &[&str] = &["qkv_proj", "o_proj"];
const FUSED_FEED_FORWARD: &[&str] = &["gate_up_proj", "down_proj"];

const SEPARATE: &[TargetPreset] = &[
    TargetPreset { name: "attention", patterns: &[ATTENTION] },
    TargetPreset { name: "all", patterns: &[ATTENTION, FEED_FORWARD] },
];
const FUSED: &[TargetPreset] = &[
    TargetPreset { name: "attention", patterns: &[FUSED_ATTENTION] },
    TargetPreset { name: "all", patterns: &[FUSED_ATTENTION, FUSED_FEED_FORWARD] },
];

const MIXTRAL: &[TargetPreset] = &[
    TargetPreset { name: "attention", patterns: &[ATTENTION] },
    TargetPreset { name: "all", patterns: &[ATTENTION, &["w1", "w2", "w3"]] },
];

/// Taken: all linear layers of a block, as the `QLoRA` paper trains them (Dettmers et al., arXiv
/// 2305.14314, section 4). Where there are experts, attention alone: each of them sees few tokens of a batch, and all
/// of their adapters are larger than the rest of the model.
const ALL_LAYERS: &str = "all";

impl LanguageFamily {
    /// Of `model_type` in `config.json`.
    pub fn of_model_type(name: &str) -> Option<Self> {
        let is_it = |facts: &&LanguageFamilyFacts| {
            facts.model_type == name || facts.containers.contains(&name)
        };
        FAMILIES.iter().find(is_it).map(|facts| facts.family)
    }

    /// Of a class in transformers.
    pub fn of_class(name: &str) -> Option<Self> {
        let is_it =
            |facts: &&LanguageFamilyFacts| facts.class == name || facts.containers.contains(&name);
        FAMILIES.iter().find(is_it).map(|facts| facts.family)
    }

    /// Of `general.architecture` in a GGUF file.
    pub fn of_architecture(name: &str) -> Option<Self> {
        FAMILIES.iter().find(|facts| facts.architecture == name).map(|facts| facts.family)
    }

    /// All that GGUF files may say there.
    pub fn architectures() -> Vec<&'static str> {
        let mut names: Vec<_> = FAMILIES.iter().map(|facts| facts.architecture).collect();
        names.dedup();
        names
    }

    /// The model's class in transformers.
    pub fn class(self) -> &'static str {
        self.facts().class
    }

    /// What GGUF files call it.
    pub fn architecture(self) -> &'static str {
        self.facts().architecture
    }

    /// The words that stand for layers with an adapter.
    pub fn target_presets(self) -> &'static [TargetPreset] {
        self.facts().target_presets
    }

    /// Layers that have an adapter unless the job says otherwise.
    pub fn default_targets(self) -> Vec<String> {
        let usual = self.facts().default_preset;
        let mut presets = self.target_presets().iter();
        let found = presets.find(|preset| preset.name == usual).expect("every family has it");
        found.patterns.concat().into_iter().map(str::to_owned).collect()
    }

    fn facts(self) -> &'static LanguageFamilyFacts {
        FAMILIES.iter().find(|facts| facts.family == self).expect("every family has a line")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_family_has_one_name_everywhere() {
        for facts in &FAMILIES {
            let read: LanguageFamily = serde_json::from_value(facts.model_type.into()).unwrap();
            assert_eq!(read, facts.family);
            assert_eq!(LanguageFamily::of_model_type(facts.model_type), Some(facts.family));
            assert_eq!(LanguageFamily::of_class(facts.class), Some(facts.family));
            assert!(!facts.family.default_targets().is_empty());
        }
        assert_eq!(LanguageFamily::of_architecture("llama"), Some(Llama));
        assert_eq!(LanguageFamily::of_class("GPT2LMHeadModel"), None);
    }
}
