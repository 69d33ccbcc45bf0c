//! That gradients reach what is trained, looked at once in a run.

use super::run::TrainingRun;
use crate::config::adapter::AdapterKind;
use crate::error::{Result, TrainerError};
use crate::event::WarningKind;
use crate::task::traits::DataLoader;

/// The step at which every layer must have learnt something. In the second, gradients reach both
/// halves of an adapter; in the third, all of a model whose blocks add nothing at first.
const CHECK_AT_STEP: u64 = 4;

impl<F: DataLoader> TrainingRun<'_, F> {
    /// Looks at the gradients of that step, before they are applied. A layer may be out of reach, if its
    /// name was typed (the prompt's queries in the last block of SD3 are); all of them may not.
    pub(super) fn check_layers(&mut self) -> Result<()> {
        if self.progress.step + 1 != CHECK_AT_STEP {
            return Ok(());
        }
        let still = self.with_fallback(|run| run.session.layers_without_gradient())?;
        let (all, n) = (self.session.n_layers(), still.len());
        match n {
            0 => Ok(()),
            _ if n == all => Err(TrainerError::NoGradients { layers: all, steps: CHECK_AT_STEP }),
            _ => {
                let is_full = self.config.adapter.kind == AdapterKind::Full;
                self.warn(WarningKind::LayersWithoutGradient { layers: still, of: all, is_full })
            }
        }
    }
}
