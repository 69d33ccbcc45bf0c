//! Whose program a model is run like, for families whose authors' program and diffusers differ.

use std::fmt;

/// Whose prompt templates and sigmas are used.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Implementation {
    /// The authors', which the models were trained with.
    #[default]
    Original,
    /// diffusers'.
    Diffusers,
}

impl fmt::Display for Implementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Original => "original",
            Self::Diffusers => "diffusers",
        })
    }
}
