//! `[cluster]`: what ranks that train together exchange; docs/clusters.md.

use super::error::ConfigError;
use super::machine::MachineConfig;
use super::optimizer::OptimizerKind;
use super::section::{ResolvedKeys, section};
use super::train::{TrainConfig, WeightDtype, exclude};
use super::value::{Switch, quoted, words};

section! {
    /// What ranks that train together exchange.
    pub RawCluster => ClusterConfig {
        /// Local steps (DiLoCo): every rank takes so many steps alone, then weights are averaged. For slow links; not the result of one process. `off`: gradients are summed in every step
        sync_every: Switch<u64> = Default(Switch::Off), AtLeast(1.0);
        /// Learning rate of the outer optimizer of local steps (Nesterov); 1 without momentum takes the average as it is
        outer_learning_rate: f64 = Default(0.7), Above(0.0);
        /// Momentum of the outer optimizer of local steps
        outer_momentum: f64 = Default(0.9), Under(0.0, 1.0);
        /// What gradients are rounded to on their way: `bf16` halves what a link has to carry
        wire: WireFormat = Default(WireFormat::F32), Any;
        /// NCCL sums gradients between NVIDIA GPUs, where every rank has one of its own. `false`: through main memory, by MPI
        nccl: bool = Default(true), Any;
        /// Every rank holds the optimizer's state of a part of the parameters (`ZeRO` stage 1), for full fine-tunes that do not fit one machine
        shard_optimizer: bool = Default(false), Any;
    }
}

/// What gradients are sent in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFormat {
    /// As they are.
    F32,
    /// Rounded to the nearest, and summed so.
    Bf16,
}

words!(WireFormat {
    "f32" => Self::F32,
    "bf16" => Self::Bf16,
});

/// Keys that would be ignored, and what an average over ranks would spoil.
pub(super) fn refuse_idle(
    cluster: &ClusterConfig,
    train: &TrainConfig,
    machine: &MachineConfig,
    optimizer: OptimizerKind,
    rows: &mut ResolvedKeys,
) -> Result<(), ConfigError> {
    if machine.deterministic {
        rows.leave_out("cluster.wire", "machine.deterministic = true")?;
        rows.leave_out("cluster.nccl", "machine.deterministic = true")?;
    } else if cluster.wire == WireFormat::Bf16 {
        rows.leave_out("cluster.nccl", "cluster.wire = \"bf16\"")?;
    } else if cluster.sync_every != Switch::Off {
        rows.leave_out("cluster.nccl", "cluster.sync_every")?;
    }
    if cluster.shard_optimizer {
        refuse_sharding(cluster, train, optimizer, rows)?;
    }
    if cluster.sync_every == Switch::Off {
        rows.leave_out("cluster.outer_learning_rate", "cluster.sync_every = \"off\"")?;
        return rows.leave_out("cluster.outer_momentum", "cluster.sync_every = \"off\"");
    }
    if train.weight_dtype != WeightDtype::F32 {
        return exclude("cluster.sync_every", "train.weight_dtype", quoted("f32"), rows);
    }
    // Both know where the parameters were, which an average over ranks does not tell them.
    if matches!(optimizer, OptimizerKind::AdamWScheduleFree | OptimizerKind::Prodigy) {
        return exclude("cluster.sync_every", "optimizer.kind", quoted("adamw"), rows);
    }
    rows.leave_out("cluster.wire", "cluster.sync_every")
}

/// Local steps need all of the state on every rank; an EMA is taken before the parameters of others have arrived; Muon and
/// Prodigy do not update parameters one by one; the average of schedule-free steps needs the state of all.
fn refuse_sharding(
    cluster: &ClusterConfig,
    train: &TrainConfig,
    optimizer: OptimizerKind,
    rows: &ResolvedKeys,
) -> Result<(), ConfigError> {
    let (other, needed) = if cluster.sync_every != Switch::Off {
        ("cluster.sync_every", "off")
    } else if train.ema != Switch::Off {
        ("train.ema", "off")
    } else if !optimizer.updates_one_by_one() || optimizer == OptimizerKind::AdamWScheduleFree {
        ("optimizer.kind", "adamw")
    } else {
        return Ok(());
    };
    exclude("cluster.shard_optimizer", other, quoted(needed), rows)
}

/// Which of a job's ranks a process is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankPart {
    /// From zero.
    pub rank: usize,
    /// How many there are.
    pub size: usize,
}

impl RankPart {
    /// Of a process alone.
    pub const ALONE: Self = Self { rank: 0, size: 1 };
}
