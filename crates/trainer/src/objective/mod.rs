//! Training objectives (losses): one file per published rule.

pub mod flow;
pub mod grpo;
pub mod preference;
