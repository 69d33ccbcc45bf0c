//! The `hearth sample` command line that uses the result of a run, with the settings of its own samples. The last
//! lines of a run and the model card show it.

use std::fmt::Display;

use super::card::shell;
use crate::config::training_data::TrainingData;
use crate::config::{RunConfig, Switch};
use crate::model::diffusion::family::DiffusionFamily;
use crate::model::kind;

/// The parts of the command line.
#[derive(Clone, Copy, Debug)]
pub struct SampleCommand<'a> {
    /// The model.
    pub base: &'a str,
    /// Flags for the other parts, if the base is one file of the transformer.
    pub parts: &'a [String],
    /// The adapter; none after a full fine-tune.
    pub adapter: Option<&'a str>,
    /// What to sample.
    pub prompt: &'a str,
    /// More options, as of [`sample_options`].
    pub options: &'a [String],
}

impl SampleCommand<'_> {
    /// As one types it into a shell.
    pub fn line(&self) -> String {
        let Self { base, parts, adapter, prompt, options } = *self;
        let mut words = vec!["hearth", "sample", "--base", base];
        words.extend(parts.iter().map(String::as_str));
        for (flag, value) in [("--adapter", adapter), ("--prompt", Some(prompt))] {
            words.extend(value.into_iter().flat_map(|value| [flag, value]));
        }
        words.extend(options.iter().map(String::as_str));
        words.into_iter().map(shell).collect::<Vec<_>>().join(" ")
    }
}

/// The settings of a job's own samples, without those that are defaults of `hearth sample`.
pub fn sample_options(config: &RunConfig) -> Vec<String> {
    let mut options = SampleOptions::default();
    options.add_unless("--dtype", config.base.dtype, "bf16");
    if let Some(quantise) = &config.base.quantise {
        options.add("--quantise", quantise);
    }
    match &config.data {
        TrainingData::Images { data, sample } => {
            let family = kind::family(&config.base.path).unwrap_or_else(DiffusionFamily::fallback);
            let defaults = family.sampling;
            // Without prompts nobody chose a size for samples: the resolution of training fits.
            let [width, height] = match sample.prompts[..] {
                [] => [data.largest_resolution(); 2],
                _ => [sample.size.width, sample.size.height],
            };
            let side = defaults.resolution;
            options.add_unless("--size", format!("{width}x{height}"), &format!("{side}x{side}"));
            options.add_unless("--steps", sample.steps, &defaults.steps.to_string());
            options.add_unless("--guidance", sample.guidance_scale, &defaults.guidance.to_string());
            options.add_unless("--true-cfg", sample.true_cfg_scale, "1");
            options.add_unless("--negative", &sample.negative_prompt, defaults.negative_prompt);
        }
        TrainingData::Texts { generate, .. } => {
            options.add_unless("--max-tokens", generate.max_tokens, "200");
            options.add_unless("--temperature", generate.temperature, "0.8");
            if let Switch::On(top_k) = generate.top_k {
                options.add("--top-k", top_k);
            }
            options.add_unless("--top-p", generate.top_p, "0.95");
        }
    }
    options.0
}

#[derive(Default)]
struct SampleOptions(Vec<String>);

impl SampleOptions {
    fn add(&mut self, flag: &str, value: impl Display) {
        self.0.extend([flag.into(), value.to_string()]);
    }

    fn add_unless(&mut self, flag: &str, value: impl Display, default: &str) {
        let value = value.to_string();
        if value != default {
            self.add(flag, value);
        }
    }
}
