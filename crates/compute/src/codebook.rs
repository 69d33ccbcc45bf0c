//! The dynamic 8-bit code: 256 values, dense near zero: Dettmers et al., "8-bit Optimizers via
//! Block-wise Quantization", arXiv 2110.02861.
//!
//! A code spends as many bits on its decimal exponent as it has leading zeros, and the rest on a
//! fraction: so the decade below 1 is cut into the most steps, the next into half as many, down to
//! the seventh. Each step is stood for by its middle; 0 and 1 are there exactly. Without a sign
//! every decade has twice the steps.

/// Decades below 1.
const DECADES: i32 = 7;

/// A size belongs to a bin by its exponent and the first seven bits of its fraction. The lowest bin
/// has all below 2^-24 too, where no book has more than one number; the highest has 1 alone.
const BIN_SHIFT: u32 = 16;
const LOWEST_BIN: usize = (127 - 24) << 7;
const N_BINS: usize = (24 << 7) + 1;

/// Numbers in rising order, and how to find the nearest.
pub(crate) struct Codebook {
    values: [f32; 256],
    /// The code of 0; sizes count up from it, and down from it where there is a sign.
    zero: u8,
    /// Where the n-th size above 0 ends and the next begins. The last is never reached.
    bounds: [f32; 256],
    /// How many bounds lie below a bin. Bins are so narrow that at most one lies within.
    below: [u8; N_BINS],
}

impl Codebook {
    /// From -1 to 1, for means of gradients.
    pub fn signed() -> Self {
        let half: Vec<f64> = (0..DECADES).flat_map(|decade| steps(decade, 1 << decade)).collect();
        let values = half.iter().flat_map(|value| [-*value, *value]);
        let mut book = Self::of(values.chain([0.0, 1.0]).collect());
        book.fill_bins();
        book
    }

    /// From 0 to 1, for means of squares. Only 0 is stored as 0: the root of a square divides, and
    /// a parameter whose small square were lost beside its neighbours' would be thrown far off.
    pub fn unsigned() -> Self {
        let values = (0..DECADES).flat_map(|decade| steps(decade, 2 << decade));
        let mut book = Self::of(values.chain([0.0, 1.0]).collect());
        book.bounds[0] = 0.0;
        book.fill_bins();
        book
    }

    fn of(mut exact: Vec<f64>) -> Self {
        exact.sort_by(f64::total_cmp);
        let zero = exact.partition_point(|value| *value < 0.0);
        let (bounds, below) = ([f32::INFINITY; 256], [0; N_BINS]);
        let mut book = Self { values: [0.0; 256], zero: zero as u8, bounds, below };
        for (value, exact) in book.values.iter_mut().zip(&exact) {
            *value = *exact as f32;
        }
        for (bound, pair) in book.bounds.iter_mut().zip(exact[zero..].windows(2)) {
            *bound = f64::midpoint(pair[0], pair[1]) as f32;
        }
        book
    }

    fn fill_bins(&mut self) {
        for (bin, below) in self.below.iter_mut().enumerate().skip(1) {
            let start = f32::from_bits(((bin + LOWEST_BIN) << BIN_SHIFT) as u32);
            *below = self.bounds.partition_point(|bound| *bound < start) as u8;
        }
    }

    /// The numbers, in the order of their codes.
    pub fn values(&self) -> &[f32; 256] {
        &self.values
    }

    /// The numbers, and then the bounds between those above 0: what a GPU needs to know.
    pub fn table(&self) -> Vec<f32> {
        [self.values, self.bounds].concat()
    }

    /// The code of 0.
    pub fn zero(&self) -> u32 {
        u32::from(self.zero)
    }

    /// The numbers that some codes stand for.
    #[inline(always)]
    pub fn decode(&self, codes: &[u8], scale: f32, numbers: &mut [f32]) {
        for (number, code) in numbers.iter_mut().zip(codes) {
            *number = self.values[usize::from(*code)] * scale;
        }
    }

    /// The codes nearest to some numbers, whose `scale` is the largest of their sizes.
    #[inline(always)]
    pub fn encode(&self, numbers: &[f32], scale: f32, codes: &mut [u8]) {
        // All are 0 then.
        let scale = if scale == 0.0 { 1.0 } else { scale };
        for (code, number) in codes.iter_mut().zip(numbers) {
            *code = self.nearest(number / scale);
        }
    }

    #[inline(always)]
    fn nearest(&self, number: f32) -> u8 {
        let size = number.abs();
        let bin = (size.to_bits() >> BIN_SHIFT) as usize;
        let below = self.below[bin.saturating_sub(LOWEST_BIN).min(N_BINS - 1)];
        let count = i32::from(below) + i32::from(size > self.bounds[usize::from(below)]);
        // All ones for a sign: signs are as good as random, and a branch on them slow.
        let sign = number.to_bits().cast_signed() >> 31;
        // There is no -1 to match the 1.
        (i32::from(self.zero) + ((count ^ sign) - sign)).max(0) as u8
    }
}

/// The middles of `count` equal steps through a decade, the lowest being the 0-th.
fn steps(decade: i32, count: usize) -> impl Iterator<Item = f64> {
    let power = 10f64.powi(decade - DECADES + 1);
    let step = 0.9 / count as f64;
    (0..count).map(move |index| power * (0.1 + step * (index as f64 + 0.5)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_books_are_full_and_in_order() {
        for book in [Codebook::signed(), Codebook::unsigned()] {
            assert!(book.values.windows(2).all(|pair| pair[0] < pair[1]));
            let bounds = &book.bounds[..255 - usize::from(book.zero)];
            assert!(bounds.windows(2).all(|pair| pair[0] < pair[1]));
            let bin = |bound: &f32| (bound.to_bits() >> BIN_SHIFT) as usize;
            assert!(bounds.windows(2).all(|pair| bin(&pair[0]) < bin(&pair[1])));
            assert_eq!(book.values[255], 1.0);
            for (code, value) in book.values.iter().enumerate() {
                assert_eq!(usize::from(book.nearest(*value)), code, "{value}");
            }
        }
        let (signed, unsigned) = (Codebook::signed().values, Codebook::unsigned().values);
        // The construction's own ends: the middle of the lowest step, and of the highest.
        assert_eq!((signed[127], signed[128]), (0.0, 5.5e-7));
        assert_eq!((signed[0], signed[254]), (-0.992_968_75, 0.992_968_75));
        assert_eq!(unsigned[..4], [0.0, 3.25e-7, 7.75e-7, 2.125e-6]);
    }

    #[test]
    fn the_nearest_number_is_chosen() {
        for (book, low) in [(Codebook::signed(), -1.0), (Codebook::unsigned(), 0.0)] {
            let evenly = (0..=10_000u16).map(|n| low + (1.0 - low) * f32::from(n) / 10_000.0);
            // Down to the smallest number that both books have.
            let by_size = (0..=6000u16).map(|n| 10f32.powf(-f32::from(n) / 1000.0));
            for number in evenly.chain(by_size) {
                let ours = (book.values[usize::from(book.nearest(number))] - number).abs();
                let best = book.values.iter().map(|value| (value - number).abs());
                let best = best.fold(f32::INFINITY, f32::min);
                assert!(ours <= best + f32::EPSILON * number.abs(), "{number}: {ours} {best}");
            }
        }
    }

    #[test]
    fn a_small_square_never_becomes_zero() {
        let book = Codebook::unsigned();
        assert_eq!((book.nearest(0.0), book.nearest(1e-30), book.nearest(2e-7)), (0, 1, 1));
    }
}
