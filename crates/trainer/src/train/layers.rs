//! Checks once in a run that gradients reach every trained layer.

use super::run::TrainingRun;
use crate::config::adapter::AdapterKind;
use crate::error::{Result, TrainerError};
use crate::event::WarningKind;
use crate::task::traits::DataLoader;

/// The step at which every layer must have a gradient. In the second, gradients reach both matrices of an
/// adapter; in the third, all of a model with zero-initialised blocks.
const CHECK_AT_STEP: u64 = 4;

impl<D: DataLoader> TrainingRun<'_, D> {
    /// Checks the gradients of that step, before they are applied, if any sample gave some. Single layers without a
    /// gradient give a warning (as the prompt's queries in the last block of SD3, if they are targeted); all of them,
    /// an error.
    pub(super) fn check_layers(&mut self, has_gradients: bool) -> Result<()> {
        if self.progress.step + 1 != CHECK_AT_STEP || !has_gradients {
            return Ok(());
        }
        let without = self.with_fallback(|run| run.session.layers_without_gradient())?;
        let (all, n) = (self.session.n_layers(), without.len());
        match n {
            0 => Ok(()),
            // All rewards were equal.
            _ if n == all && self.session.is_policy_gradient() => Ok(()),
            _ if n == all => Err(TrainerError::NoGradients { layers: all, steps: CHECK_AT_STEP }),
            _ => {
                let is_full = self.config.adapter.kind == AdapterKind::Full;
                self.warn(WarningKind::LayersWithoutGradient { layers: without, of: all, is_full })
            }
        }
    }
}
