//! The flow-matching noise scheduler: the timesteps of training and the sigmas of sampling, as in diffusers'
//! `FlowMatchEulerDiscreteScheduler` and its pipelines.
//!
//! A sampler's sigmas are spaced evenly, then shifted towards noise, σ' = s·σ / (1 + (s - 1)·σ), then perhaps
//! stretched to a terminal value. Families differ in the spacing and in where s comes from.

use serde::Deserialize;

use crate::model::config::Unsupported;
use crate::objective::flow::{Timestep, TimestepShift};

/// What `scheduler/scheduler_config.json` says, and the family's spacing of sigmas.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct FlowMatchScheduler {
    /// Timesteps in training.
    pub num_train_timesteps: usize,
    /// Shift towards noise, where it does not depend on the size of an image.
    #[serde(default = "one")]
    pub shift: f64,
    #[serde(default)]
    use_dynamic_shifting: bool,
    #[serde(flatten)]
    dynamic_shift: DynamicShift,
    #[serde(default)]
    time_shift_type: TimeShift,
    /// The last sigma before 0, if they are stretched.
    #[serde(default)]
    shift_terminal: Option<f64>,
    #[serde(default)]
    use_karras_sigmas: bool,
    #[serde(default)]
    use_exponential_sigmas: bool,
    #[serde(default)]
    use_beta_sigmas: bool,
    #[serde(default)]
    invert_sigmas: bool,
    #[serde(default)]
    stochastic_sampling: bool,
    /// The family's.
    #[serde(skip)]
    spacing: SigmaSpacing,
}

/// How a sampler's sigmas are spaced before they are shifted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum SigmaSpacing {
    /// From the highest to the lowest training sigma, which are shifted already: SD3.
    #[default]
    Trained,
    /// From 1 to 1/n in n steps: FLUX, Qwen-Image, Kandinsky 5 as its authors sample it.
    Reciprocal,
    /// From 1 to 0: Z-Image.
    ToZero,
}

/// The logarithm μ of the shift, linear in the number of image tokens.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(default)]
struct DynamicShift {
    base_shift: f64,
    max_shift: f64,
    base_image_seq_len: f64,
    max_image_seq_len: f64,
    /// FLUX.2's empirical fit to tokens and steps.
    #[serde(skip)]
    is_empirical: bool,
}

impl Default for DynamicShift {
    /// Taken: the defaults of diffusers' scheduler, which FLUX states too.
    fn default() -> Self {
        let (base_shift, max_shift) = (0.5, 1.15);
        let (base_image_seq_len, max_image_seq_len) = (256.0, 4096.0);
        Self { base_shift, max_shift, base_image_seq_len, max_image_seq_len, is_empirical: false }
    }
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
enum TimeShift {
    #[default]
    Exponential,
    Linear,
}

fn one() -> f64 {
    1.0
}

impl FlowMatchScheduler {
    /// With a constant shift.
    pub fn fixed(shift: f64, spacing: SigmaSpacing) -> Self {
        Self {
            num_train_timesteps: 1000,
            shift,
            use_dynamic_shifting: false,
            dynamic_shift: DynamicShift::default(),
            time_shift_type: TimeShift::Exponential,
            shift_terminal: None,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            invert_sigmas: false,
            stochastic_sampling: false,
            spacing,
        }
    }

    /// With a shift that grows with the number of image tokens, from μ = `base_shift` at 256 tokens to
    /// `max_shift` at `max_tokens`.
    pub fn dynamic(base_shift: f64, max_shift: f64, max_tokens: usize) -> Self {
        let by_tokens = DynamicShift {
            base_shift,
            max_shift,
            max_image_seq_len: max_tokens as f64,
            ..DynamicShift::default()
        };
        let fixed = Self::fixed(1.0, SigmaSpacing::Reciprocal);
        Self { use_dynamic_shifting: true, dynamic_shift: by_tokens, ..fixed }
    }

    /// With the empirical fit to tokens and steps: FLUX.2.
    pub fn empirical() -> Self {
        let by_tokens = DynamicShift { is_empirical: true, ..DynamicShift::default() };
        let fixed = Self::fixed(1.0, SigmaSpacing::Reciprocal);
        Self { use_dynamic_shifting: true, dynamic_shift: by_tokens, ..fixed }
    }

    /// The same with another spacing.
    #[must_use]
    pub fn with_spacing(self, spacing: SigmaSpacing) -> Self {
        Self { spacing, ..self }
    }

    /// The same, stretched so that this is the last sigma before 0.
    #[must_use]
    pub fn with_terminal(self, terminal: f64) -> Self {
        Self { shift_terminal: Some(terminal), ..self }
    }

    /// Checks that all of it is supported.
    pub fn check(&self) -> Result<(), Unsupported> {
        let switches = [
            ("use_karras_sigmas", self.use_karras_sigmas),
            ("use_exponential_sigmas", self.use_exponential_sigmas),
            ("use_beta_sigmas", self.use_beta_sigmas),
            ("invert_sigmas", self.invert_sigmas),
            ("stochastic_sampling", self.stochastic_sampling),
        ];
        if let Some((name, _)) = switches.iter().find(|(_, is_on)| *is_on) {
            return Err(Unsupported(format!("{name} is on, hearth does not support it")));
        }
        let is_linear = self.use_dynamic_shifting && self.time_shift_type == TimeShift::Linear;
        Unsupported::unless(!is_linear, "time_shift_type linear is not exponential".into())?;
        let DynamicShift { base_image_seq_len: low, max_image_seq_len: high, .. } =
            self.dynamic_shift;
        Unsupported::unless(
            high > low,
            format!("max_image_seq_len {high} is not above base_image_seq_len {low}"),
        )?;
        let is_terminal_fit = self.shift_terminal.is_none_or(|last| (0.0..1.0).contains(&last));
        Unsupported::unless(is_terminal_fit, "shift_terminal is not between 0 and 1".into())?;
        Unsupported::unless(
            self.shift > 0.0 && self.num_train_timesteps > 0,
            format!("shift {} over {} timesteps", self.shift, self.num_train_timesteps),
        )
    }

    /// Sigmas of `steps` steps, from 1 to 0, for an image of so many tokens.
    pub fn sigmas(&self, tokens: usize, steps: usize) -> Vec<f32> {
        let shift = self.shift_at(tokens, steps);
        let mut sigmas: Vec<f64> =
            self.linspace(steps).map(|sigma| shifted(shift, sigma)).collect();
        if let (Some(terminal), Some(last)) = (self.shift_terminal, sigmas.last().copied()) {
            let stretch = (1.0 - last) / (1.0 - terminal);
            // A single step begins at 1 and has no last sigma to stretch.
            for sigma in sigmas.iter_mut().filter(|sigma| **sigma < 1.0) {
                *sigma = 1.0 - (1.0 - *sigma) / stretch;
            }
        }
        sigmas.into_iter().map(|sigma| sigma as f32).chain([0.0]).collect()
    }

    /// The timestep of a sigma.
    pub fn timestep(&self, sigma: f32) -> Timestep {
        Timestep { sigma, t: sigma * self.num_train_timesteps as f32 }
    }

    /// The training timesteps.
    pub fn train_timesteps(&self, shift: TimestepShift) -> TrainTimesteps {
        let (listed, by_tokens) = (self.listed_timesteps(), self.dynamic_shift);
        TrainTimesteps { listed, shift, by_tokens }
    }

    fn listed_timesteps(&self) -> Vec<Timestep> {
        let n = self.num_train_timesteps;
        let shift = self.train_shift() as f32;
        // In f32 as the reference, since these values are the model's input.
        let level = |index: usize| {
            let sigma = index as f32 / n as f32;
            self.timestep(shift * sigma / (1.0 + (shift - 1.0) * sigma))
        };
        (1..=n).rev().map(level).collect()
    }

    /// The shift in training: a dynamic shift is for sampling only.
    fn train_shift(&self) -> f64 {
        if self.use_dynamic_shifting { 1.0 } else { self.shift }
    }

    fn shift_at(&self, tokens: usize, steps: usize) -> f64 {
        if !self.use_dynamic_shifting {
            return self.shift;
        }
        let tokens = tokens as f64;
        let mu = if self.dynamic_shift.is_empirical {
            empirical_mu(tokens, steps as f64)
        } else {
            self.dynamic_shift.mu(tokens)
        };
        mu.exp()
    }

    fn linspace(&self, steps: usize) -> impl Iterator<Item = f64> {
        let lowest = match self.spacing {
            SigmaSpacing::Trained => {
                shifted(self.train_shift(), 1.0 / self.num_train_timesteps as f64)
            }
            SigmaSpacing::Reciprocal => 1.0 / steps.max(1) as f64,
            SigmaSpacing::ToZero => 0.0,
        };
        let share = move |index: usize| index as f64 / (steps.max(2) - 1) as f64;
        (0..steps).map(move |index| 1.0 + share(index) * (lowest - 1.0))
    }
}

fn shifted(shift: f64, sigma: f64) -> f64 {
    shift * sigma / (1.0 + (shift - 1.0) * sigma)
}

impl DynamicShift {
    fn mu(&self, tokens: f64) -> f64 {
        let Self {
            base_shift, max_shift, base_image_seq_len: low, max_image_seq_len: high, ..
        } = *self;
        base_shift + (max_shift - base_shift) / (high - low) * (tokens - low)
    }
}

/// Taken: `compute_empirical_mu` of diffusers' FLUX.2 pipeline: lines for 10 and for 200 steps, and between them.
fn empirical_mu(tokens: f64, steps: f64) -> f64 {
    let at_200 = 0.000_169_27 * tokens + 0.456_666_66;
    if tokens > 4300.0 {
        return at_200;
    }
    let at_10 = 8.738_095_24e-5 * tokens + 1.898_333_33;
    let per_step = (at_200 - at_10) / 190.0;
    at_200 + per_step * (steps - 200.0)
}

/// The timesteps of training.
#[derive(Clone, Debug, PartialEq)]
pub struct TrainTimesteps {
    /// The scheduler's, from most noise to least.
    listed: Vec<Timestep>,
    shift: TimestepShift,
    by_tokens: DynamicShift,
}

impl TrainTimesteps {
    /// The timestep at a fraction from 0, most noise, to 1, for an image of so many tokens.
    pub fn at(&self, fraction: f64, tokens: usize) -> Timestep {
        let n = self.listed.len();
        let shift = match self.shift {
            TimestepShift::Scheduler => {
                return self.listed[((fraction * n as f64) as usize).min(n - 1)];
            }
            TimestepShift::Resolution => self.by_tokens.mu(tokens as f64).exp(),
            TimestepShift::Fixed(shift) => shift,
        };
        let sigma = shifted(shift, (1.0 - fraction).max(1.0 / n as f64)) as f32;
        Timestep { sigma, t: sigma * n as f32 }
    }
}

/// One Euler step along the velocity, from one sigma to the next.
pub fn euler_step(latents: &mut [f32], velocity: &[f32], from: f32, to: f32) {
    for (latent, velocity) in latents.iter_mut().zip(velocity) {
        *latent += (to - from) * velocity;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::path::Path;

    use super::*;

    /// Tokens of an image of that many pixels, 16 along a token's side.
    fn tokens(width: usize, height: usize) -> usize {
        (width / 16) * (height / 16)
    }

    /// A list of the reference by its name: the schedule, and the tokens of the image.
    fn schedule(name: &str) -> (FlowMatchScheduler, usize) {
        let words: Vec<&str> = name.split(['_', ' ']).collect();
        // One side, or both as in 928x1664.
        let pixels = |at: usize| {
            let mut sides = words[at].split('x').map(|side| side.parse().unwrap());
            let width = sides.next().unwrap();
            tokens(width, sides.next().unwrap_or(width))
        };
        let shift = |prefix| words.iter().find_map(|word| word.strip_prefix(prefix)?.parse().ok());
        match &words[..] {
            ["flux1", "dev", ..] => (FlowMatchScheduler::dynamic(0.5, 1.15, 4096), pixels(2)),
            ["flux1", "schnell", ..] => {
                (FlowMatchScheduler::fixed(1.0, SigmaSpacing::Reciprocal), 4096)
            }
            ["qwen", ..] => {
                let schedule = FlowMatchScheduler::dynamic(0.5, 0.9, 8192).with_terminal(0.02);
                (schedule, pixels(2))
            }
            ["kandinsky5", "original", ..] => {
                (FlowMatchScheduler::fixed(shift("scale").unwrap(), SigmaSpacing::Reciprocal), 4096)
            }
            ["kandinsky5", ..] => {
                (FlowMatchScheduler::fixed(shift("shift").unwrap(), SigmaSpacing::Trained), 4096)
            }
            ["z", _, "diffusers", ..] => {
                (FlowMatchScheduler::fixed(3.0, SigmaSpacing::Reciprocal), 4096)
            }
            ["z", ..] => (FlowMatchScheduler::fixed(3.0, SigmaSpacing::ToZero), 4096),
            ["flux2", ..] => (FlowMatchScheduler::empirical(), pixels(1)),
            _ => panic!("{name} is a list of no family"),
        }
    }

    #[derive(Deserialize)]
    struct List {
        steps: usize,
        sigmas: Vec<f32>,
    }

    /// `tests/golden/schedules/schedules.json`: made with the pipelines' own schedulers, to six digits.
    #[test]
    fn a_single_step_goes_from_noise_to_the_image() {
        let schedule = FlowMatchScheduler::dynamic(0.5, 0.9, 8192).with_terminal(0.02);
        assert_eq!(schedule.sigmas(4096, 1), [1.0, 0.0]);
        let two = schedule.sigmas(4096, 2);
        assert!((two[1] - 0.02).abs() < 1e-6 && two[0] == 1.0, "{two:?}");
    }

    #[test]
    fn sigmas_are_those_of_every_familys_sampler() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("../../tests/golden/schedules/schedules.json");
        let text = std::fs::read_to_string(path).unwrap();
        let lists: BTreeMap<String, List> = serde_json::from_str(&text).unwrap();
        assert_eq!(lists.len(), 26);
        for (name, List { steps, sigmas }) in lists {
            let (schedule, tokens) = schedule(&name);
            schedule.check().unwrap();
            let ours = schedule.sigmas(tokens, steps);
            assert_eq!(ours.len(), sigmas.len(), "{name}");
            for (index, (ours, theirs)) in ours.iter().zip(&sigmas).enumerate() {
                assert!((ours - theirs).abs() < 1.5e-6, "{name} {index}: {ours} {theirs}");
            }
        }
    }

    #[test]
    fn settings_are_read_as_diffusers_writes_them() {
        let read = |text: &str| serde_json::from_str::<FlowMatchScheduler>(text).unwrap();
        let qwen = read(
            r#"{"num_train_timesteps": 1000, "shift": 1.0, "use_dynamic_shifting": true,
            "base_shift": 0.5, "max_shift": 0.9, "base_image_seq_len": 256,
            "max_image_seq_len": 8192, "shift_terminal": 0.02, "time_shift_type": "exponential"}"#,
        );
        let expected = FlowMatchScheduler::dynamic(0.5, 0.9, 8192).with_terminal(0.02);
        assert_eq!(qwen.with_spacing(SigmaSpacing::Reciprocal), expected);
        let sd3 = read(r#"{"num_train_timesteps": 1000, "shift": 3.0}"#);
        assert_eq!(sd3, FlowMatchScheduler::fixed(3.0, SigmaSpacing::Trained));
    }

    #[test]
    fn unsupported_settings_are_refused() {
        for (text, says) in [
            (r#""use_karras_sigmas": true"#, "use_karras_sigmas is on, hearth does not support it"),
            (
                r#""use_dynamic_shifting": true, "time_shift_type": "linear""#,
                "time_shift_type linear is not exponential",
            ),
            (
                r#""max_image_seq_len": 256"#,
                "max_image_seq_len 256 is not above base_image_seq_len 256",
            ),
            (r#""shift_terminal": 1.0"#, "shift_terminal is not between 0 and 1"),
            (r#""shift": 0"#, "shift 0 over 1000 timesteps"),
        ] {
            let text = format!("{{\"num_train_timesteps\": 1000, {text}}}");
            let read: FlowMatchScheduler = serde_json::from_str(&text).unwrap();
            let Unsupported(problem) = read.check().unwrap_err();
            assert_eq!(problem, says, "{text}");
        }
    }

    /// σ' = s·σ / (1 + (s - 1)·σ), with s from the image's tokens: e^1.15 at 4096 and e^0.5 at 256 of them.
    #[test]
    fn timesteps_of_training_are_shifted_as_asked() {
        let scheduler = FlowMatchScheduler::dynamic(0.5, 1.15, 4096);
        let at = |shift, fraction, tokens| scheduler.train_timesteps(shift).at(fraction, tokens);
        assert_eq!(at(TimestepShift::Scheduler, 0.5, 4096), Timestep { sigma: 0.5, t: 500.0 });
        let Timestep { sigma, t } = at(TimestepShift::Fixed(3.0), 0.5, 4096);
        assert_eq!((sigma, t), (0.75, 750.0));
        for (tokens, mu) in [(4096, 1.15_f64), (256, 0.5)] {
            let sigma = f64::from(at(TimestepShift::Resolution, 0.5, tokens).sigma);
            assert!((sigma - mu.exp() / (mu.exp() + 1.0)).abs() < 1e-6, "{tokens}: {sigma}");
        }
        // Least noise is that of the last listed timestep, shifted; never none at all.
        let least = at(TimestepShift::Fixed(3.0), 1.0, 0).sigma;
        assert!((0.002..0.004).contains(&least), "{least}");
    }
}
