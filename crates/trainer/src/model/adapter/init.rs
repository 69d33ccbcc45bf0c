//! An adapter of a layer as tensors of a device: a new one, or one that was loaded.

use compute::ops::row_norms;
use compute::{Device, Dtype, RandomSequence, Tensor};

use super::factors::{Factors, LokrFactor};
use super::layer_weights::LayerWeights;
use super::target::{AdapterForm, AdapterTarget};
use crate::error::{Result, TrainerError};
use crate::model::build::WeightTensor;

/// An adapter's tensors before they are parameters.
pub(super) struct AdapterTensors {
    pub(super) rank: usize,
    pub(super) alpha: f32,
    pub(super) dropout: f32,
    pub(super) factors: Factors<Tensor>,
    /// With the row norms of the frozen matrix.
    pub(super) magnitude: Option<(Tensor, Tensor)>,
    pub(super) rate_factors: [f32; 2],
}

impl AdapterTensors {
    /// An adapter that changes nothing yet; magnitudes are the row norms.
    pub(super) fn random_init(
        device: &Device,
        target: &AdapterTarget,
        weight: &WeightTensor,
        sizes: [usize; 2],
        sequence: InitSequence,
    ) -> Result<Self> {
        let AdapterTarget { rank, mut alpha, dropout, form, rate_factors, .. } = *target;
        let norms =
            || Ok::<_, TrainerError>((row_norms(weight.into())?, row_norms(weight.into())?));
        let magnitude = (form == AdapterForm::Dora).then(norms);
        let (shapes, stds) = initial(form, rank, sizes);
        let mut stds = stds.into_iter().enumerate();
        let factors = shapes.try_map(|[rows, columns]| {
            let (index, std) = stds.next().unwrap_or((0, InitStd::Zero));
            let std = match std {
                InitStd::Zero => return device.zeros([*rows, *columns], Dtype::F32),
                InitStd::Normal(std) => std,
                InitStd::Uniform => 1.0 / (3.0 * *columns as f32).sqrt(),
            };
            device.normal([*rows, *columns], Dtype::F32, std, sequence.of(index))
        })?;
        // Whole factors have no rank to be scaled by.
        if let Factors::Lokr { w1: LokrFactor::Full(_), w2: LokrFactor::Full(_) } = factors {
            alpha = rank as f32;
        }
        Ok(Self { rank, alpha, dropout, factors, magnitude: magnitude.transpose()?, rate_factors })
    }

    pub(super) fn loaded(
        device: &Device,
        given: &LayerWeights,
        weight: &WeightTensor,
        [outputs, _]: [usize; 2],
    ) -> Result<Self> {
        let LayerWeights { rank, alpha, factors, magnitude } = given;
        let upload = |magnitude: &Vec<f32>| {
            Ok::<_, TrainerError>((device.upload([outputs], magnitude)?, row_norms(weight.into())?))
        };
        Ok(Self {
            rank: *rank,
            alpha: *alpha,
            dropout: 0.0,
            factors: factors.try_map(|matrix| device.upload(matrix.sizes(), &matrix.values))?,
            magnitude: magnitude.as_ref().map(upload).transpose()?,
            rate_factors: [1.0; 2],
        })
    }
}

/// The random numbers of a layer.
#[derive(Clone, Copy)]
pub(super) struct InitSequence {
    pub(super) seed: u64,
    pub(super) layer: u64,
}

impl InitSequence {
    /// Those of its matrix at an index.
    fn of(self, index: usize) -> RandomSequence {
        RandomSequence::new(self.seed.wrapping_add(index as u64), self.layer)
    }
}

/// How a matrix is initialised.
#[derive(Clone, Copy)]
enum InitStd {
    Zero,
    /// Normal with this standard deviation.
    Normal(f32),
    /// Normal with that of PyTorch's `kaiming_uniform_` with a = √5: 1 / √(3·columns).
    Uniform,
}

/// The shapes of new matrices, and how each is initialised: `LoRA` as the reference scripts have it, the others as
/// `LyCORIS` has them.
fn initial(
    form: AdapterForm,
    rank: usize,
    [outputs, inputs]: [usize; 2],
) -> (Factors<[usize; 2]>, Vec<InitStd>) {
    let pair = [[outputs, rank], [rank, inputs]];
    match form {
        AdapterForm::Lora | AdapterForm::Dora => (
            Factors::Lora { down: pair[1], up: pair[0] },
            vec![InitStd::Normal(1.0 / rank as f32), InitStd::Zero],
        ),
        AdapterForm::Loha => {
            let stds = [InitStd::Normal(0.1), InitStd::Normal(1.0), InitStd::Zero];
            (Factors::Loha { w1: pair, w2: pair }, [&stds[..], &stds[1..2]].concat())
        }
        AdapterForm::Lokr(shape) => {
            let factors = shape.factors(rank, [outputs, inputs]);
            // The last matrix of all is zeros.
            let mut stds = vec![InitStd::Uniform; factors.all().count()];
            if let Some(last) = stds.last_mut() {
                *last = InitStd::Zero;
            }
            (factors, stds)
        }
    }
}
