//! A tensor's extent in each dimension, outermost first.

use std::fmt;

/// More dimensions than any tensor we hold: a batch of videos has five.
const MAX_RANK: usize = 5;

/// The sizes of a tensor's dimensions; rows are what lies in the last one.
#[derive(Clone, Copy, PartialEq, Eq)]
pub struct Shape {
    sizes: [usize; MAX_RANK],
    rank: usize,
}

impl Shape {
    /// A shape of these sizes.
    ///
    /// # Panics
    /// With more than five sizes, which no caller has.
    pub fn new(sizes: &[usize]) -> Self {
        let mut all = [1; MAX_RANK];
        all[..sizes.len()].copy_from_slice(sizes);
        Self { sizes: all, rank: sizes.len() }
    }

    /// The sizes, outermost first.
    pub fn sizes(&self) -> &[usize] {
        &self.sizes[..self.rank]
    }

    /// How many elements there are; one for a shape without dimensions.
    pub fn elements(&self) -> usize {
        self.sizes().iter().product()
    }

    /// The length of a row: the last dimension.
    pub fn width(&self) -> usize {
        self.sizes().last().copied().unwrap_or(1)
    }

    /// How many rows there are: all dimensions but the last, multiplied.
    pub fn rows(&self) -> usize {
        self.sizes()[..self.rank.saturating_sub(1)].iter().product()
    }

    /// The same shape with rows of another length.
    #[must_use]
    pub fn with_width(mut self, width: usize) -> Self {
        self.sizes[self.rank.saturating_sub(1)] = width;
        self
    }
}

impl<const N: usize> From<[usize; N]> for Shape {
    fn from(sizes: [usize; N]) -> Self {
        Self::new(&sizes)
    }
}

impl fmt::Display for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.sizes()).finish()
    }
}

impl fmt::Debug for Shape {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}
