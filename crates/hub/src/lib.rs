//! Downloads models from the Hugging Face hub into its cache. The one crate with a network, used by `hearth fetch` alone:
//! whatever reads models finds them in the cache without it (`weights::hub`).
//!
//! ```text
//! HubClient ──▶ HubModel       the commit, and the files of it with sizes and checksums
//!                  │ select    those that hearth needs
//!               FetchJob ──▶ threads, each with a range of a file ──▶ blobs/CHECKSUM ──▶ snapshots/COMMIT/FILE ──▶ refs/main
//! ```
//!
//! What the server says is checked before it is used: names of files stay in the snapshot, checksums name blobs and are
//! compared with what came, a token goes to the endpoint alone.

pub mod client;
pub mod error;
pub mod fetch;
pub mod model;
pub mod select;
mod snapshot;
mod staging;
mod tls;

pub use crate::client::HubClient;
pub use crate::error::HubError;
pub use crate::fetch::{FetchJob, FetchOutcome};
pub use crate::model::{FileChecksum, HubModel, RemoteFile};
pub use crate::select::FileSelection;
