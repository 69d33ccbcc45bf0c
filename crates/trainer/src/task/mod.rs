//! What a task is: a model with its loss, what it is fed with, and all that lives between two steps. A plan rehearses it on a
//! device without data, and the loop in `train/` runs it; neither knows which task it is.

pub(crate) mod prefetch;
pub(crate) mod seed;
pub(crate) mod session;
pub mod traits;
