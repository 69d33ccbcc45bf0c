//! How precise a model is whose layers multiply in fp8: looked at before the first step, over the first sample of the
//! run. A run that goes on looks at the same one with the same untrained adapters, whatever its micro-batch is now, and
//! so comes to the same.

use compute::Device;

use crate::config::RunConfig;
use crate::config::base::ComputeType;
use crate::error::Result;
use crate::event::WarningKind;
use crate::task::session::Session;
use crate::task::traits::DataLoader;

/// The error that a layer's result may have, relative to its size. Chosen: about three times that of activations which
/// are rounded to e4m3, so that a layer is left out whose result is a small difference of large numbers.
const ALLOWED: f64 = 0.1;

/// Leaves layers out that lose too much, if the job is in fp8: what to warn of, if there are some.
pub(super) fn check<D: DataLoader>(
    config: &RunConfig,
    session: &Session<'_, D::Task>,
    device: &Device,
    loader: &D,
) -> Result<Option<WarningKind>> {
    if config.base.compute == ComputeType::Dtype {
        return Ok(None);
    }
    let (mut batch, _) = loader.read_from(0).next_batch()?;
    loader.complete_batch(device, session.trainable_model(), &mut batch)?;
    let (_, micro_batch) = loader.micro_batch(&batch.samples[..1])?;
    let checks = session.check_fp8(&micro_batch, ALLOWED)?;
    // NaN is the largest of all.
    let larger = |a: f64, b: f64| if a >= b { a } else { b };
    let (of, error) = (checks.len(), checks.iter().map(|it| it.error).fold(0.0, larger));
    let layers: Vec<String> =
        checks.into_iter().filter(|it| !it.is_in_fp8).map(|it| it.layer).collect();
    let is_any = !layers.is_empty();
    Ok(is_any.then_some(WarningKind::Fp8Inexact { layers, of, error, allowed: ALLOWED }))
}
