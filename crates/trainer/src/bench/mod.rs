//! Work that is only measured: models and stacks of blocks with random weights, each with a twin in `benches/peers`.

pub mod cases;
pub mod compress;
pub mod workload;
