//! Linear layers that share the rows of their input: those of the experts of a mixture.

use compute::ops::{RowGroups, Weight};
use compute::{Result, Tape, Var};

use super::{LayerAdapter, LayerWeight, LinearLayer};
use crate::error::{self, TrainerError};
use crate::model::adapter::factors::Factors;

/// One layer for each group of rows, with a LoRA each or without.
pub struct GroupedLayers(Vec<LinearLayer>);

impl GroupedLayers {
    /// Of layers of one shape, without biases.
    pub fn new(layers: Vec<LinearLayer>) -> error::Result<Self> {
        let is_fit = |adapter: &LayerAdapter| {
            let is_lora = matches!(adapter.factors, Factors::Lora { .. });
            is_lora && adapter.magnitude.is_none() && adapter.dropout == 0.0
        };
        let adapters: Vec<_> = layers.iter().filter_map(|layer| layer.adapter.as_ref()).collect();
        let has_training = layers.iter().any(|layer| layer.training.is_some());
        let problem = if !adapters.iter().all(|adapter| is_fit(adapter)) || has_training {
            "experts take a LoRA alone, without dropout"
        } else if !adapters.is_empty() && adapters.len() != layers.len() {
            "some experts of a layer have an adapter, others have none"
        } else {
            return Ok(Self(layers));
        };
        Err(TrainerError::Request {
            problem: problem.into(),
            hint: "set adapter.targets to \"attention\", or adapter.kind to \"lora\" for all experts",
        })
    }

    /// The rows of each group, x [rows, in], through its layer: [rows, out].
    pub fn forward(&self, tape: &Tape<'_>, x: &Var, groups: &RowGroups) -> Result<Var> {
        let trained: Vec<Option<Var>> = self.0.iter().map(|layer| layer.trained(tape)).collect();
        let weights: Vec<Weight<'_>> = self
            .0
            .iter()
            .zip(&trained)
            .map(|(layer, trained)| layer.weight(trained.as_ref()))
            .collect();
        let y = tape.grouped_linear(x, groups, &weights)?;
        let adapters = self.0.iter().filter_map(|layer| layer.adapter.as_ref());
        let (mut downs, mut ups, mut scale) = (Vec::new(), Vec::new(), 0.0);
        for adapter in adapters.filter(|_| tape.has_adapters()) {
            if let Factors::Lora { down, up } = adapter.factors.map(|key| tape.param(*key)) {
                downs.push(down);
                ups.push(up);
                scale = adapter.scale;
            }
        }
        if downs.is_empty() {
            return Ok(y);
        }
        let inner = tape.grouped_linear(x, groups, &weights_of(&downs))?;
        let inner = tape.scale(&inner, scale)?;
        tape.add(&y, &tape.grouped_linear(&inner, groups, &weights_of(&ups))?)
    }
}

fn weights_of(vars: &[Var]) -> Vec<Weight<'_>> {
    vars.iter().map(Into::into).collect()
}

impl LinearLayer {
    /// Its weight on the tape, if that is trained.
    fn trained(&self, tape: &Tape<'_>) -> Option<Var> {
        match &self.weight {
            LayerWeight::Frozen(_) => None,
            LayerWeight::Trained(key) => Some(tape.param(*key)),
        }
    }

    fn weight<'a>(&'a self, trained: Option<&'a Var>) -> Weight<'a> {
        match (&self.weight, trained) {
            (_, Some(trained)) => trained.into(),
            (LayerWeight::Frozen(held), None) => held.into(),
            (LayerWeight::Trained(_), None) => unreachable!("a trained weight is on the tape"),
        }
    }
}
