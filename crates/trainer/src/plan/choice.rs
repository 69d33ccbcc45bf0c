//! The candidates of a plan: values for the keys that change memory and speed and that were not set. Keys that
//! were set stay.
//!
//! Two kinds. Micro-batch size, gradient checkpointing and block offloading give the same result (but for the
//! order of sums); offloading is chosen only where nothing else fits or it is clearly faster. Precisions change
//! the result: they come from the best down, and a worse one is taken only where nothing fits with a better one.

use compute::Quantisation;

use crate::config::RunConfig;
use crate::config::adapter::AdapterKind;
use crate::config::batch::BatchSettings;
use crate::config::optimizer::OptimizerKind;
use crate::model::offload::Offload;
use crate::model::recompute::Recompute;
use crate::plan::DeviceBudget;

/// Formats of the frozen weights and of the optimizer's state, and how gradients are clipped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Precisions {
    /// A fused backward pass clips each tensor's gradient alone.
    pub is_fused: bool,
    pub quantise: Option<Quantisation>,
    pub optimizer: OptimizerKind,
}

/// Formats of frozen matrices that a plan may choose, from the most precise down. Fp8 takes as much memory as
/// int8 and loses more, so that it is only used when it is set.
pub(super) const FORMATS: [Option<Quantisation>; 3] =
    [None, Some(Quantisation::Int8), Some(Quantisation::Nf4)];

/// Micro-batch sizes and gradient checkpointing, from the most memory to the least.
pub(super) fn batch_options(config: &RunConfig, is_fused: bool) -> Vec<BatchSettings> {
    let micros = match config.train.micro_batch {
        _ if is_fused => vec![config.train.batch_size],
        Some(micro) => vec![micro.min(config.train.batch_size)],
        None => halves(config.train.batch_size),
    };
    let recomputes = if config.is_free("train.recompute") {
        Recompute::ALL.to_vec()
    } else {
        vec![config.train.recompute]
    };
    let with = |recompute| {
        micros.iter().map(move |micro| BatchSettings { micro_batch: *micro, recompute })
    };
    recomputes.into_iter().flat_map(with).collect()
}

/// n, half of it, ..., 1.
fn halves(n: usize) -> Vec<usize> {
    let half = |n: &usize| (*n > 1).then(|| n.div_ceil(2));
    std::iter::successors(Some(n), half).collect()
}

/// Precisions from the best down.
pub(super) fn precisions(config: &RunConfig) -> Vec<Precisions> {
    let is_frozen = config.adapter.kind != AdapterKind::Full;
    let formats = if is_frozen && config.is_free("base.quantise") {
        FORMATS.to_vec()
    } else {
        vec![config.base.quantise]
    };
    let optimizers = if config.is_free("optimizer.kind") {
        vec![OptimizerKind::AdamW, OptimizerKind::AdamW8bit]
    } else {
        vec![config.optimizer.kind]
    };
    let mut found = Vec::new();
    for is_fused in fused_options(config) {
        for quantise in &formats {
            let with = |optimizer: &OptimizerKind| Precisions {
                is_fused,
                quantise: *quantise,
                optimizer: *optimizer,
            };
            found.extend(optimizers.iter().map(with));
        }
    }
    found
}

/// Whether the backward pass may be fused, no first.
pub(super) fn fused_options(config: &RunConfig) -> Vec<bool> {
    if !config.is_free("train.fused_backward_pass") {
        vec![config.train.fused_backward_pass]
    } else if config.can_fuse_backward() {
        vec![false, true]
    } else {
        vec![false]
    }
}

/// Which frozen blocks may be offloaded, none first. Only a GPU with memory of its own gains by it.
pub(super) fn offloads(config: &RunConfig, budget: DeviceBudget<'_>) -> Vec<Offload> {
    let is_frozen = config.adapter.kind != AdapterKind::Full;
    if !config.is_free("machine.offload") {
        vec![config.machine.offload]
    } else if is_frozen && budget.host_bytes.is_some() {
        vec![Offload::None, Offload::Alternate, Offload::Blocks]
    } else {
        vec![Offload::None]
    }
}

/// Formats of text encoders from the best down.
pub(super) fn encoder_formats(config: &RunConfig) -> Vec<Option<Quantisation>> {
    if config.is_free("base.quantise_encoders") {
        FORMATS.to_vec()
    } else {
        vec![config.base.quantise_encoders]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::config::RawConfig;
    use crate::config::batch::PlanChoice;

    fn job(settings: &[&str]) -> RunConfig {
        let mut raw = RawConfig::empty();
        for setting in ["base.path=base", "data.images=images"].iter().chain(settings) {
            raw.set(setting).unwrap();
        }
        raw.resolve().unwrap()
    }

    #[test]
    fn keys_that_were_not_set_are_chosen() {
        let config = job(&["train.batch_size=6"]);
        let all = batch_options(&config, false);
        let micros: Vec<_> = all.iter().take(4).map(|settings| settings.micro_batch).collect();
        assert_eq!((all.len(), micros), (20, vec![6, 3, 2, 1]));
        assert_eq!(all[0], BatchSettings { micro_batch: 6, recompute: Recompute::None });
        assert_eq!(all[19], BatchSettings { micro_batch: 1, recompute: Recompute::Block });
        assert_eq!((precisions(&config).len(), encoder_formats(&config).len()), (6, 3));
    }

    #[test]
    fn keys_that_were_set_stay() {
        let typed = [
            "train.batch_size=4",
            "train.micro_batch=3",
            "train.recompute=none",
            "base.quantise=none",
            "base.quantise_encoders=nf4",
            "optimizer.kind=adamw_8bit",
        ];
        let config = job(&typed);
        assert_eq!(
            batch_options(&config, false),
            [BatchSettings { micro_batch: 3, recompute: Recompute::None }]
        );
        let optimizer = OptimizerKind::AdamW8bit;
        let only = Precisions { is_fused: false, quantise: None, optimizer };
        assert_eq!(precisions(&config), [only]);
        assert_eq!(encoder_formats(&config), [Some(Quantisation::Nf4)]);
    }

    #[test]
    fn a_backward_pass_is_fused_last_and_only_where_it_can_be() {
        let fused = |settings: &[&str]| {
            let config = job(&[&["train.batch_size=4"], settings].concat());
            precisions(&config).iter().map(|of| of.is_fused).collect::<Vec<_>>()
        };
        let full = "adapter.kind=full";
        assert_eq!(fused(&[full]), [false, false, true, true]);
        assert_eq!(fused(&[full, "train.fused_backward_pass=false"]), [false, false]);
        assert_eq!(fused(&[full, "train.fused_backward_pass=true"]), [true, true]);
        assert_eq!(fused(&["base.quantise=none"]), [false, false]);
        for other in ["train.gradient_accumulation=2", "train.micro_batch=2", "base.dtype=f16"] {
            assert_eq!(fused(&[full, other]), [false, false], "{other}");
        }
        let all = batch_options(&job(&[full, "train.batch_size=4"]), true);
        assert!(all.len() == 5 && all.iter().all(|settings| settings.micro_batch == 4), "{all:?}");
    }

    #[test]
    fn a_job_takes_what_was_chosen_and_says_so() {
        let config = job(&["train.batch_size=4", "optimizer.kind=adamw"]);
        let choice = PlanChoice {
            micro_batch: 2,
            recompute: Recompute::Block,
            quantise: Some(Quantisation::Nf4),
            ..PlanChoice::from_config(&config)
        };
        let planned = config.with_choice(&choice);
        assert_eq!(PlanChoice::from_config(&planned), choice);
        let text = planned.resolved();
        assert!(text.contains("micro_batch = 2 # chosen by the plan"), "{text}");
        assert!(text.contains("quantise = \"nf4\" # chosen by the plan"), "{text}");
        assert!(text.contains("kind = \"adamw\" # --set optimizer.kind=adamw"), "{text}");
    }
}
