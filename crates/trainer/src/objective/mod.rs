//! What training minimises: one file per published rule.

pub mod flow;
