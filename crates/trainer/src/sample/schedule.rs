//! How noise is taken away: the levels a picture goes through, and the step between two of them.
//! Flow matching with Euler's method, as diffusers' `FlowMatchEulerDiscreteScheduler` has it.

use serde::Deserialize;

use crate::model::config::Unsupported;

/// What `scheduler/scheduler_config.json` says.
#[derive(Clone, Debug, PartialEq, Deserialize)]
pub struct Config {
    /// Levels in training.
    pub num_train_timesteps: usize,
    /// Moves levels towards noise.
    pub shift: f64,
    #[serde(default)]
    use_dynamic_shifting: bool,
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
    #[serde(default)]
    shift_terminal: Option<f64>,
}

impl Config {
    /// What SD3 comes with.
    pub fn published() -> Self {
        Self {
            num_train_timesteps: 1000,
            shift: 3.0,
            use_dynamic_shifting: false,
            use_karras_sigmas: false,
            use_exponential_sigmas: false,
            use_beta_sigmas: false,
            invert_sigmas: false,
            stochastic_sampling: false,
            shift_terminal: None,
        }
    }

    /// That all of it can be computed.
    pub fn check(&self) -> Result<(), Unsupported> {
        let switches = [
            ("use_dynamic_shifting", self.use_dynamic_shifting),
            ("use_karras_sigmas", self.use_karras_sigmas),
            ("use_exponential_sigmas", self.use_exponential_sigmas),
            ("use_beta_sigmas", self.use_beta_sigmas),
            ("invert_sigmas", self.invert_sigmas),
            ("stochastic_sampling", self.stochastic_sampling),
            ("shift_terminal", self.shift_terminal.is_some()),
        ];
        if let Some((name, _)) = switches.iter().find(|(_, is_on)| *is_on) {
            return Err(Unsupported(format!("{name} is on, hearth samples without it")));
        }
        Unsupported::unless(
            self.shift > 0.0 && self.num_train_timesteps > 0,
            format!("shift {} over {} timesteps", self.shift, self.num_train_timesteps),
        )
    }

    /// Shares of noise to go through in `steps` steps, from all to none.
    pub fn sigmas(&self, steps: usize) -> Vec<f32> {
        let lowest = self.shifted(1.0 / self.num_train_timesteps as f64);
        let even = |index: usize| {
            let share = index as f64 / (steps.max(2) - 1) as f64;
            self.shifted(1.0 + share * (lowest - 1.0)) as f32
        };
        // Its lowest level is shifted twice: once in training, once here.
        (0..steps).map(even).chain([0.0]).collect()
    }

    /// A share of noise as models are told it.
    pub fn timestep(&self, sigma: f32) -> f32 {
        sigma * self.num_train_timesteps as f32
    }

    fn shifted(&self, sigma: f64) -> f64 {
        self.shift * sigma / (1.0 + (self.shift - 1.0) * sigma)
    }
}

/// Moves latents along their velocity from one share of noise to the next.
pub fn step(latents: &mut [f32], velocity: &[f32], from: f32, to: f32) {
    for (latent, velocity) in latents.iter_mut().zip(velocity) {
        *latent += (to - from) * velocity;
    }
}

/// What the prompt asks for, exaggerated against what nothing, or a negative prompt, asks for.
pub fn guide(without: &[f32], with: &[f32], guidance: f32) -> Vec<f32> {
    without.iter().zip(with).map(|(without, with)| without + guidance * (with - without)).collect()
}
