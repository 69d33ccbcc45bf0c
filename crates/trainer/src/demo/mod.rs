//! The built-in model and its images: what `hearth demo` needs to show a fine-tuning on any
//! computer, without a download. Images are drawn from a seed, the model's folder is made from
//! them; both are the same on every machine. The transformer's weights are not made here: hearth
//! trains them like any other model's.

pub mod autoencoder;
mod files;
mod font;
pub mod kit;
pub mod paint;
pub mod scene;
pub mod set;
pub mod shape;
pub mod sheet;
pub mod show;
pub mod statistics;
mod vocabulary;

pub use crate::config::data::DemoStyle;
pub use files::unpack;
pub use scene::{Background, Colour, Scene, ShapePosition, ShapeSize};
pub use set::{DrawnSet, draw_set};
pub use shape::DemoShape;
pub use sheet::BeforeAfter;
pub use statistics::ImageStatistics;

#[cfg(test)]
mod tests;
