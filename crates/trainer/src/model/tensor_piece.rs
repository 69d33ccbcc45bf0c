//! Where a tensor lies in a file of another layout. Other programs fuse several of our matrices into one: q, k
//! and v are thirds of `qkv` in SD3, and sevenths of `linear1` in FLUX, whose other four are the feed-forward. A video
//! autoencoder has kernels for several frames, of which an image needs the last.

use std::ops::Range;

use weights::TensorInfo;

/// Some rows of a stored tensor: of `total` groups of rows of equal size, `count` from the `from`-th on.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorPiece {
    /// The tensor's name in the file.
    pub key: String,
    /// The first group.
    pub from: usize,
    /// How many groups.
    pub count: usize,
    /// Groups in the stored tensor.
    pub total: usize,
    /// A dimension of the stored tensor of which the last index is taken alone.
    pub last_of: Option<usize>,
}

impl TensorPiece {
    /// All of it.
    pub fn whole(key: impl Into<String>) -> Self {
        Self::part(key, 0, 1)
    }

    /// One of `of` equal parts.
    pub fn part(key: impl Into<String>, part: usize, of: usize) -> Self {
        Self { key: key.into(), from: part, count: 1, total: of, last_of: None }
    }

    /// All of it at the last index of a dimension.
    pub fn last_of(key: impl Into<String>, dim: usize) -> Self {
        Self { last_of: Some(dim), ..Self::whole(key) }
    }

    /// The same rows of another tensor.
    #[must_use]
    pub fn with_key(self, key: String) -> Self {
        Self { key, ..self }
    }

    /// The stored tensor that rows are taken of: `stored`, or what lies at the last index of a dimension.
    pub fn tensor(&self, stored: &TensorInfo) -> TensorInfo {
        let last = |dim: usize| stored.select(dim, stored.shape.get(dim)?.checked_sub(1)?);
        self.last_of.and_then(last).unwrap_or_else(|| stored.clone())
    }

    /// Its rows, of a stored tensor with `stored` rows.
    pub fn rows(&self, stored: usize) -> Range<usize> {
        let group = stored / self.total.max(1);
        self.from * group..(self.from + self.count) * group
    }
}

/// Rows of the stored tensor that `pieces` are cut from, if together they are `ours` rows; `None` if no number
/// of rows fits.
pub fn stored_rows(pieces: &[TensorPiece], ours: usize) -> Option<usize> {
    let of = pieces.first()?.total;
    let n_groups: usize = pieces.iter().map(|piece| piece.count).sum();
    let is_fit = n_groups > 0 && ours.is_multiple_of(n_groups);
    is_fit.then(|| ours / n_groups * of)
}

#[cfg(test)]
mod tests {
    use std::slice::from_ref;

    use super::*;

    /// FLUX's `linear1`, 21504 rows of seven groups: q, k, v and four of the feed-forward.
    #[test]
    fn pieces_of_unequal_size_fit_into_one_tensor() {
        let feed_forward = TensorPiece { count: 4, ..TensorPiece::part("linear1", 3, 7) };
        let keys = TensorPiece::part("linear1", 1, 7);
        assert_eq!(stored_rows(from_ref(&feed_forward), 12288), Some(21504));
        assert_eq!(stored_rows(from_ref(&keys), 3072), Some(21504));
        assert_eq!(feed_forward.rows(21504), 9216..21504);
        assert_eq!(keys.rows(21504), 3072..6144);
        // Halves the other way round are all of it.
        let halves = [TensorPiece::part("modulation", 1, 2), TensorPiece::part("modulation", 0, 2)];
        assert_eq!(stored_rows(&halves, 10), Some(10));
        assert_eq!(stored_rows(&[feed_forward], 10), None);
    }
}
