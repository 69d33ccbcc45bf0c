//! The data's way: config, plan, data, model, objective, optimizer, training loop, export, in
//! folders of that order. Emits events and prints nothing.

pub mod workload;
