//! A training task: a model and its loss, a data loader, and the state that lives between steps. The plan does a dry run
//! of it on the meta device, and the loop in `train/` runs it; neither knows which task it is.
//!
//! ```text
//! traits.rs     Task (model and loss) and DataLoader (batches)
//! session.rs    Session: the model with its parameters, gradients, optimizer and EMA
//! fused_backward.rs   parameters updated within backward
//! prefetch.rs   batches read ahead by a thread
//! seed.rs       seeds, one for each purpose
//! ```

mod fused_backward;
pub(crate) mod prefetch;
pub(crate) mod seed;
pub(crate) mod session;
pub mod traits;
