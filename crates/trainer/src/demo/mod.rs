//! The built-in model and its pictures: what `hearth demo` needs to show a fine-tuning on any
//! computer, without a download. Pictures are drawn from a seed, the model's folder is made from
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
mod words;

pub use crate::config::data::Style;
pub use files::unpack;
pub use scene::{Background, Colour, Place, Scene, Size};
pub use set::{Drawn, draw_set};
pub use shape::Shape;
pub use sheet::Pair;
pub use statistics::Statistics;

#[cfg(test)]
mod tests;
