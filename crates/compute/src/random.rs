//! Counter-based random numbers: the n-th number of a sequence is a function of seed, sequence and n, so a
//! recomputed block sees the same ones, on any number of threads and on any backend.
//!
//! Philox4x32-10: Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011, section 4.2.

/// Four random words for one counter.
#[inline(always)]
pub(crate) fn philox(key: [u32; 2], counter: [u32; 4]) -> [u32; 4] {
    let (mut key, mut c) = (key, counter);
    for _ in 0..10 {
        let (a, b) = (0xD251_1F53 * u64::from(c[0]), 0xCD9E_8D57 * u64::from(c[2]));
        c = [
            (b >> 32) as u32 ^ c[1] ^ key[0],
            b as u32,
            (a >> 32) as u32 ^ c[3] ^ key[1],
            a as u32,
        ];
        key = [key[0].wrapping_add(0x9E37_79B9), key[1].wrapping_add(0xBB67_AE85)];
    }
    c
}

/// One sequence of random numbers, read at any index.
#[derive(Clone, Copy, Debug)]
pub struct RandomSequence {
    seed: u64,
    /// Which of the seed's sequences it is.
    index: u64,
    /// Where its numbers begin.
    first: usize,
}

impl RandomSequence {
    /// The sequence of this index among those of a seed.
    pub fn new(seed: u64, number: u64) -> Self {
        Self { seed, index: number, first: 0 }
    }

    /// The same numbers but for the first `n`.
    #[must_use]
    pub fn skip(self, n: usize) -> Self {
        Self { first: self.first + n, ..self }
    }

    /// Seed, number and first place: all that its numbers follow from.
    pub(crate) fn parts(self) -> [u64; 3] {
        [self.seed, self.index, self.first as u64]
    }

    /// The word at `index`.
    #[inline(always)]
    pub fn word(self, index: usize) -> u32 {
        let index = self.first + index;
        let block = (index / 4) as u64;
        let key = [self.seed as u32, (self.seed >> 32) as u32];
        let number = [self.index as u32, (self.index >> 32) as u32];
        philox(key, [block as u32, (block >> 32) as u32, number[0], number[1]])[index % 4]
    }

    /// The number at `index`, uniform over (0, 1): never 0 nor 1, so that logarithms are finite.
    #[inline(always)]
    pub fn uniform(self, index: usize) -> f32 {
        ((self.word(index) >> 9) as f32 + 0.5) * (1.0 / (1 << 23) as f32)
    }

    /// The number at `index` of the standard normal distribution (Box and Muller).
    pub fn normal(self, index: usize) -> f32 {
        let (all, index) = (Self { first: 0, ..self }, self.first + index);
        let pair = index / 2 * 2;
        let (radius, angle) = (f64::from(all.uniform(pair)), f64::from(all.uniform(pair + 1)));
        let (sin, cos) = (std::f64::consts::TAU * angle).sin_cos();
        ((-2.0 * radius.ln()).sqrt() * if index.is_multiple_of(2) { cos } else { sin }) as f32
    }
}

/// A sequence read from its start, for tests.
#[cfg(test)]
pub(crate) struct TestRng {
    sequence: RandomSequence,
    at: usize,
}

#[cfg(test)]
impl TestRng {
    pub fn new(seed: u64) -> Self {
        Self { sequence: RandomSequence::new(seed, 0), at: 0 }
    }

    pub fn below(&mut self, bound: usize) -> usize {
        self.at += 1;
        self.sequence.word(self.at - 1) as usize % bound
    }

    pub fn normal(&mut self) -> f32 {
        self.at += 1;
        self.sequence.normal(self.at - 1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers of the authors' own test file (Random123, `tests/kat_vectors`).
    #[test]
    fn philox_gives_its_authors_numbers() {
        let ones = u32::MAX;
        let known = [
            ([0, 0], [0; 4], [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]),
            ([ones; 2], [ones; 4], [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]),
            (
                [0xa409_3822, 0x299f_31d0],
                [0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344],
                [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1],
            ),
        ];
        for (key, counter, words) in known {
            assert_eq!(philox(key, counter), words);
        }
    }

    #[test]
    fn a_later_beginning_gives_the_same_numbers() {
        let stream = RandomSequence::new(7, 3);
        for first in [1, 2, 5] {
            let later = stream.skip(1).skip(first - 1);
            for index in 0..9 {
                assert_eq!(later.word(index), stream.word(first + index));
                assert_eq!(later.normal(index).to_bits(), stream.normal(first + index).to_bits());
            }
        }
    }

    #[test]
    fn normal_numbers_have_the_right_moments() {
        let stream = RandomSequence::new(7, 3);
        let count = 100_000;
        let moment = |power: i32| -> f64 {
            (0..count).map(|i| f64::from(stream.normal(i)).powi(power)).sum::<f64>()
                / f64::from(count as u32)
        };
        assert!(moment(1).abs() < 0.02, "{}", moment(1));
        assert!((moment(2) - 1.0).abs() < 0.02, "{}", moment(2));
        assert!((moment(4) - 3.0).abs() < 0.1, "{}", moment(4));
    }
}
