//! Image and video datasets: folders of images, clips and captions, up to the pixels and texts of one step. Knows nothing
//! of models, devices or training; a problem with a file is a value, never the end of a scan.
//!
//! `scan` finds images and clips with their captions, `decode` decodes an image, `decoding` bounds its memory, `clip` the frames of a clip, `bucket` chooses its size, `resize` scales
//! and crops it, `caption` augments captions, of which `caption_choice` takes a line, `batch_sampler` decides which images a step sees.
//!
//! Deliberately absent: colour profiles and PNG's gamma. The images that models were pretrained on were
//! read without them.

pub mod batch_sampler;
pub mod bucket;
pub mod caption;
pub mod caption_choice;
pub mod clip;
mod clip_folder;
mod contain;
pub(crate) mod csv;
pub mod decode;
pub mod decoding;
pub mod fault;
pub mod findings;
mod header;
mod jpeg_scans;
mod listing;
pub mod mask;
mod metadata;
mod pairs;
mod png_rows;
pub mod problem;
pub mod reference;
pub mod resize;
pub(crate) mod roots;
pub mod scan;
mod sniff;
#[cfg(test)]
mod tests;
mod text;
mod walk;

use std::collections::BTreeMap;

pub use crate::pixels::Pixels;
pub use batch_sampler::BatchSampler;
pub use bucket::{Bucket, Buckets};
pub use clip::{ClipSegment, TrainingClip};
pub use contain::is_decoding;
pub use decode::decode;
pub use decoding::{DecodingMemory, DecodingNeed};
pub use findings::{Findings, LeftOut};
pub use header::MOST_PIXELS;
pub use mask::{ImageMask, MaskSource};
pub use problem::{Problem, ProblemKind};
pub use reference::{ReferenceSize, SampleSize};
pub use resize::{Crop, frames_to_chw, resize_and_crop, to_chw};
pub use scan::{
    CaptionSource, FolderScan, ImageItem, MediaKinds, ReferenceImage, ScanOptions, scan,
};

/// Sizes of samples that occur, each with how many there are.
pub type SizeCounts<S> = BTreeMap<S, usize>;
