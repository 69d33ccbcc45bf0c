//! The matrices that an adapter adds to a layer's weight, in the forms that programs know. Sizes of the factors are
//! those of `LyCORIS` and PEFT, so that both read them.
//!
//! | form | added to the weight | matrices |
//! |---|---|---|
//! | `LoRA` | B·A | A [r, in], B [out, r] |
//! | `LoHa` | (w1a·w1b) ⊙ (w2a·w2b) | each a [out, r], each b [r, in] |
//! | `LoKr` | w1 ⊗ w2 | w1 [l, m], w2 [k, n] with out = l·k and in = m·n; each whole or a·b of rank r |
//! | norm | a vector | w [d, 1], and one for the bias if there is one |

use std::array;

/// The matrices of an adapter, each as values, a tensor, or a parameter.
#[derive(Clone, Debug, PartialEq)]
pub enum Factors<T> {
    /// Low rank (Hu et al., arXiv 2106.09685).
    Lora {
        /// A
        down: T,
        /// B
        up: T,
    },
    /// The elementwise product of two of low rank (Hyeon-Woo et al., arXiv 2108.06098).
    Loha {
        /// a and b of the first.
        w1: [T; 2],
        /// Those of the second.
        w2: [T; 2],
    },
    /// A Kronecker product (Yeh et al., arXiv 2309.14859).
    Lokr {
        /// The outer factor.
        w1: LokrFactor<T>,
        /// The inner one.
        w2: LokrFactor<T>,
    },
    /// Of a norm and no linear layer: what is added to its weight, not of low rank.
    Norm {
        /// To the weight.
        weight: T,
        /// To the bias.
        bias: Option<T>,
    },
}

/// A factor of a Kronecker product.
#[derive(Clone, Debug, PartialEq)]
pub enum LokrFactor<T> {
    /// The matrix.
    Full(T),
    /// a and b: it is a·b.
    LowRank([T; 2]),
}

impl<T> Factors<T> {
    /// The matrices with their names in files; those of a `LoRA` are given, since programs differ.
    pub fn named(&self, lora: [&'static str; 2]) -> Vec<(&'static str, &T)> {
        match self {
            Self::Lora { down, up } => vec![(lora[0], down), (lora[1], up)],
            Self::Loha { w1, w2 } => HADA.into_iter().zip(w1.iter().chain(w2)).collect(),
            Self::Lokr { w1, w2 } => {
                [w1, w2].into_iter().zip(LOKR).flat_map(|(w, names)| w.named(names)).collect()
            }
            Self::Norm { weight, bias } => {
                NORM.into_iter().zip(std::iter::once(weight).chain(bias)).collect()
            }
        }
    }

    /// The matrices.
    pub fn all(&self) -> impl Iterator<Item = &T> {
        self.named([""; 2]).into_iter().map(|(_, matrix)| matrix)
    }

    /// The same form of what `make` makes of each.
    pub fn try_map<U, E>(&self, mut make: impl FnMut(&T) -> Result<U, E>) -> Result<Factors<U>, E> {
        Ok(match self {
            Self::Lora { down, up } => Factors::Lora { down: make(down)?, up: make(up)? },
            Self::Loha { w1: [a, b], w2: [c, d] } => {
                Factors::Loha { w1: [make(a)?, make(b)?], w2: [make(c)?, make(d)?] }
            }
            Self::Lokr { w1, w2 } => {
                Factors::Lokr { w1: w1.try_map(&mut make)?, w2: w2.try_map(&mut make)? }
            }
            Self::Norm { weight, bias } => {
                Factors::Norm { weight: make(weight)?, bias: bias.as_ref().map(make).transpose()? }
            }
        })
    }

    /// The same where nothing can fail.
    pub fn map<U>(&self, mut make: impl FnMut(&T) -> U) -> Factors<U> {
        let mapped = self.try_map(|matrix| Ok::<_, std::convert::Infallible>(make(matrix)));
        mapped.unwrap_or_else(|never| match never {})
    }

    /// What people call the form.
    pub fn form_name(&self) -> &'static str {
        match self {
            Self::Lora { .. } => "LoRA",
            Self::Loha { .. } => "LoHa",
            Self::Lokr { .. } => "LoKr",
            Self::Norm { .. } => "trained norm",
        }
    }

    /// Whether it is that of a norm and no linear layer's.
    pub fn is_norm(&self) -> bool {
        matches!(self, Self::Norm { .. })
    }
}

/// Names of a `LoHa`'s matrices, in the order of [`Factors::named`].
pub const HADA: [&str; 4] = ["hada_w1_a", "hada_w1_b", "hada_w2_a", "hada_w2_b"];
/// Names of each factor of a `LoKr`: whole, or a and b.
pub const LOKR: [[&str; 3]; 2] =
    [["lokr_w1", "lokr_w1_a", "lokr_w1_b"], ["lokr_w2", "lokr_w2_a", "lokr_w2_b"]];
/// Names of what is added to a norm's weight and bias.
pub const NORM: [&str; 2] = ["w_norm", "b_norm"];

impl<T> LokrFactor<T> {
    fn named(&self, [whole, a, b]: [&'static str; 3]) -> Vec<(&'static str, &T)> {
        match self {
            Self::Full(matrix) => vec![(whole, matrix)],
            Self::LowRank(pair) => [a, b].into_iter().zip(pair).collect(),
        }
    }

    fn try_map<U, E>(&self, mut make: impl FnMut(&T) -> Result<U, E>) -> Result<LokrFactor<U>, E> {
        Ok(match self {
            Self::Full(matrix) => LokrFactor::Full(make(matrix)?),
            Self::LowRank([a, b]) => LokrFactor::LowRank([make(a)?, make(b)?]),
        })
    }

    /// Rows and columns, of matrices that have these.
    pub fn sizes(&self, of: impl Fn(&T) -> [usize; 2]) -> [usize; 2] {
        match self {
            Self::Full(matrix) => of(matrix),
            Self::LowRank([a, b]) => [of(a)[0], of(b)[1]],
        }
    }
}

/// How the Kronecker factors of a new `LoKr` are chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LokrShape {
    /// Rows and columns of the outer factor; the most even split without.
    pub factor: Option<usize>,
    /// Whether the inner factor is whole whatever the rank.
    pub is_full_matrix: bool,
    /// Whether the outer factor is of low rank too.
    pub decomposes_both: bool,
}

impl LokrShape {
    /// The shapes of the factors of a weight [out, in], each whole or of low rank: a factor is whole where a low rank
    /// would save nothing.
    pub fn factors(self, rank: usize, [outputs, inputs]: [usize; 2]) -> Factors<[usize; 2]> {
        let ([l, k], [m, n]) = (split(outputs, self.factor), split(inputs, self.factor));
        let factor = |rows: usize, columns: usize, may_be_low: bool| {
            let is_low = may_be_low && !self.is_full_matrix && 2 * rank < rows.max(columns);
            if is_low {
                LokrFactor::LowRank([[rows, rank], [rank, columns]])
            } else {
                LokrFactor::Full([rows, columns])
            }
        };
        Factors::Lokr { w1: factor(l, m, self.decomposes_both), w2: factor(k, n, true) }
    }
}

/// Two factors of a size, the smaller first: `factor` is one of them if it divides the size; else they are as even as
/// they can be with the first at most `factor`. As `factorization` of `LyCORIS`; PEFT's does not put the smaller first.
pub fn split(size: usize, factor: Option<usize>) -> [usize; 2] {
    if let Some(factor) = factor.filter(|factor| *factor > 0 && size.is_multiple_of(*factor)) {
        return [factor.min(size / factor), factor.max(size / factor)];
    }
    let most = factor.unwrap_or(size);
    let (mut first, mut second) = (1, size);
    while first < second {
        let next = (first + 1..=size).find(|next| size.is_multiple_of(*next));
        let Some(next) = next.filter(|next| *next <= most) else { break };
        if next + size / next > first + second {
            break;
        }
        (first, second) = (next, size / next);
    }
    [first.min(second), first.max(second)]
}

/// The values of a matrix.
#[derive(Clone, Debug, PartialEq)]
pub struct AdapterMatrix {
    /// Of the matrix.
    pub rows: usize,
    /// Of the matrix.
    pub columns: usize,
    /// Row by row; empty where only the shape counts.
    pub values: Vec<f32>,
}

impl AdapterMatrix {
    /// With these values.
    pub fn new([rows, columns]: [usize; 2], values: Vec<f32>) -> Self {
        Self { rows, columns, values }
    }

    /// [rows, columns]
    pub fn sizes(&self) -> [usize; 2] {
        [self.rows, self.columns]
    }

    /// A row.
    pub fn row(&self, index: usize) -> &[f32] {
        &self.values[index * self.columns..][..self.columns]
    }

    /// Some rows.
    #[must_use]
    pub fn some_rows(&self, rows: impl IntoIterator<Item = usize>) -> Self {
        let values: Vec<f32> = rows.into_iter().flat_map(|row| self.row(row).to_vec()).collect();
        Self { rows: values.len() / self.columns.max(1), columns: self.columns, values }
    }

    /// Some columns.
    #[must_use]
    pub fn some_columns(&self, columns: &[usize]) -> Self {
        let rows = (0..self.rows).map(|row| self.row(row));
        let values = rows.flat_map(|row| columns.iter().map(move |column| row[*column])).collect();
        Self { rows: self.rows, columns: columns.len(), values }
    }

    /// Matrix · vector.
    fn apply(&self, x: &[f64]) -> Vec<f64> {
        let dot =
            |row| -> f64 { self.row(row).iter().zip(x).map(|(a, x)| f64::from(*a) * x).sum() };
        (0..self.rows).map(dot).collect()
    }
}

/// A row of a·b.
fn low_rank_row(a: &AdapterMatrix, b: &AdapterMatrix, index: usize) -> Vec<f64> {
    let mut row = vec![0.0; b.columns];
    for (factor, from) in a.row(index).iter().zip(b.values.chunks(b.columns)) {
        for (sum, value) in row.iter_mut().zip(from) {
            *sum += f64::from(*factor) * f64::from(*value);
        }
    }
    row
}

impl LokrFactor<AdapterMatrix> {
    fn row(&self, index: usize) -> Vec<f64> {
        match self {
            Self::Full(matrix) => matrix.row(index).iter().map(|value| f64::from(*value)).collect(),
            Self::LowRank([a, b]) => low_rank_row(a, b, index),
        }
    }

    /// The matrix that it is.
    fn whole(&self) -> AdapterMatrix {
        let [rows, columns] = self.sizes(AdapterMatrix::sizes);
        let values = (0..rows).flat_map(|row| self.row(row)).map(|value| value as f32).collect();
        AdapterMatrix { rows, columns, values }
    }
}

impl Factors<AdapterMatrix> {
    /// [out, in] of the layer.
    pub fn sizes(&self) -> [usize; 2] {
        match self {
            Self::Lora { down, up } => [up.rows, down.columns],
            Self::Loha { w1: [a, b], .. } => [a.rows, b.columns],
            Self::Lokr { w1, w2 } => {
                let [outer, inner] = [w1, w2].map(|w| w.sizes(AdapterMatrix::sizes));
                array::from_fn(|axis| outer[axis] * inner[axis])
            }
            Self::Norm { weight, .. } => weight.sizes(),
        }
    }

    /// A row of what is added to the weight, without the scale.
    pub fn row(&self, index: usize) -> Vec<f64> {
        match self {
            Self::Lora { down, up } => low_rank_row(up, down, index),
            Self::Loha { w1: [a, b], w2: [c, d] } => {
                let rows = low_rank_row(a, b, index).into_iter().zip(low_rank_row(c, d, index));
                rows.map(|(a, b)| a * b).collect()
            }
            Self::Lokr { w1, w2 } => {
                let [inner_rows, _] = w2.sizes(AdapterMatrix::sizes);
                let (outer, inner) = (w1.row(index / inner_rows), w2.row(index % inner_rows));
                outer.iter().flat_map(|a| inner.iter().map(move |b| a * b)).collect()
            }
            Self::Norm { weight, .. } => vec![f64::from(weight.values[index])],
        }
    }

    /// Whether something is added to a bias.
    pub fn has_bias(&self) -> bool {
        matches!(self, Self::Norm { bias: Some(_), .. })
    }

    /// A number of what is added to the bias.
    pub fn of_bias(&self, index: usize) -> f64 {
        match self {
            Self::Norm { bias: Some(bias), .. } => f64::from(bias.values[index]),
            _ => 0.0,
        }
    }

    /// What is added to the weight times a vector, without the scale and without the matrix that is added; of a norm, with
    /// what is added to the bias.
    pub fn apply(&self, x: &[f64]) -> Vec<f64> {
        match self {
            Self::Lora { down, up } => up.apply(&down.apply(x)),
            Self::Loha { w1: [a, b], w2: [c, d] } => {
                // Σᵢⱼ a(o, i)·c(o, j)·Σₓ b(i, x)·d(j, x)·x
                let scaled = |row: &[f32]| -> Vec<f64> {
                    row.iter().zip(x).map(|(b, x)| f64::from(*b) * x).collect()
                };
                let inner: Vec<_> = (0..b.rows).map(|i| d.apply(&scaled(b.row(i)))).collect();
                let output = |o: usize| -> f64 {
                    let pairs = a.row(o).iter().zip(&inner);
                    let by_first = pairs.map(|(a, inner)| {
                        let sum: f64 =
                            c.row(o).iter().zip(inner).map(|(c, x)| f64::from(*c) * x).sum();
                        f64::from(*a) * sum
                    });
                    by_first.sum()
                };
                (0..a.rows).map(output).collect()
            }
            Self::Lokr { w1, w2 } => {
                let (outer, inner) = (w1.whole(), w2.whole());
                let groups: Vec<_> =
                    x.chunks(inner.columns.max(1)).map(|x| inner.apply(x)).collect();
                let number = |o: usize| -> f64 {
                    let pairs = outer.row(o / inner.rows).iter().zip(&groups);
                    pairs.map(|(w, group)| f64::from(*w) * group[o % inner.rows]).sum()
                };
                (0..outer.rows * inner.rows).map(number).collect()
            }
            Self::Norm { weight, .. } => {
                let sums = weight.apply(x).into_iter().enumerate();
                sums.map(|(index, sum)| sum + self.of_bias(index)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What `lycoris.functional.general.factorization` of `LyCORIS` 4.1.3 gives.
    #[test]
    fn sizes_are_split_as_by_others() {
        let cases = [
            ((128, None), [8, 16]),
            ((256, None), [16, 16]),
            ((127, None), [1, 127]),
            ((3072, None), [48, 64]),
            ((128, Some(4)), [4, 32]),
            ((128, Some(5)), [4, 32]),
            ((12, Some(16)), [3, 4]),
            ((360, Some(7)), [6, 60]),
            ((1024, Some(8)), [8, 128]),
            ((4, Some(8)), [2, 2]),
            ((32, Some(16)), [2, 16]),
            ((1, None), [1, 1]),
        ];
        for ((size, factor), expected) in cases {
            assert_eq!(split(size, factor), expected, "{size} {factor:?}");
        }
    }

    #[test]
    fn a_factor_is_whole_where_a_low_rank_saves_nothing() {
        let low = |shape: LokrShape, rank| {
            let factors = shape.factors(rank, [64, 128]);
            factors
                .named([""; 2])
                .into_iter()
                .map(|(name, sizes)| (name, *sizes))
                .collect::<Vec<_>>()
        };
        let eight = LokrShape { factor: Some(8), ..LokrShape::default() };
        let (a, b) = (("lokr_w2_a", [8, 4]), ("lokr_w2_b", [4, 16]));
        assert_eq!(low(eight, 4), [("lokr_w1", [8, 8]), a, b]);
        assert_eq!(low(eight, 8), [("lokr_w1", [8, 8]), ("lokr_w2", [8, 16])]);
        let whole = LokrShape { is_full_matrix: true, ..eight };
        assert_eq!(low(whole, 1), [("lokr_w1", [8, 8]), ("lokr_w2", [8, 16])]);
        let both = LokrShape { decomposes_both: true, ..eight };
        let first = [("lokr_w1_a", [8, 3]), ("lokr_w1_b", [3, 8])];
        assert_eq!(low(both, 3)[..2], first);
    }

    /// A row, and what a vector becomes, are two ways to the same matrix.
    #[test]
    fn rows_and_vectors_agree() {
        let matrix = |rows: usize, columns: usize, seed: usize| {
            let number = |at: usize| ((at * 7 + seed * 3) % 11) as f32 - 5.0;
            AdapterMatrix::new([rows, columns], (0..rows * columns).map(number).collect())
        };
        let low = |rows, columns, seed| [matrix(rows, 2, seed), matrix(2, columns, seed + 1)];
        let all = [
            Factors::Lora { down: matrix(2, 6, 1), up: matrix(4, 2, 2) },
            Factors::Loha { w1: low(4, 6, 3), w2: low(4, 6, 5) },
            Factors::Lokr {
                w1: LokrFactor::Full(matrix(2, 3, 7)),
                w2: LokrFactor::LowRank(low(2, 2, 8)),
            },
        ];
        let x: Vec<f64> = (0..6).map(|at| f64::from(at) - 2.0).collect();
        for factors in all {
            assert_eq!(factors.sizes(), [4, 6]);
            let dot = |row: Vec<f64>| row.iter().zip(&x).map(|(a, x)| a * x).sum::<f64>();
            let by_rows: Vec<f64> = (0..4).map(|row| dot(factors.row(row))).collect();
            assert_eq!(factors.apply(&x), by_rows, "{}", factors.form_name());
        }
    }
}
