//! A training task: a model and its loss, a data loader, and the state that lives between steps. The plan does a dry run
//! of it on the meta device, and the loop in `train/` runs it; neither knows which task it is.
//!
//! ```text
//! traits.rs     Task (model and loss) and DataLoader (batches)
//! session.rs    Session: the model with its parameters, gradients, optimizer and EMA
//! exchange.rs   gradients summed over ranks, weights averaged over them
//! gradient_sums.rs    buckets of gradients that are summed while backward completes others
//! gpu_sums.rs   gradients summed between GPUs by NCCL
//! exact_sums.rs sums that do not depend on their order
//! sharded.rs    an optimizer whose state is sharded over ranks
//! fused_backward.rs   parameters updated within backward
//! prefetch.rs   batches read ahead by a thread
//! seed.rs       seeds, one for each purpose
//! ```

mod exact_sums;
mod exchange;
mod fused_backward;
mod gpu_sums;
mod gradient_sums;
pub(crate) mod prefetch;
pub(crate) mod seed;
pub(crate) mod session;
mod sharded;
pub mod traits;
