//! Training objectives (losses): one file per published rule.

pub mod bias;
pub mod flow;
pub mod grpo;
pub mod preference;
pub mod velocity_loss;
pub mod weighting;
