//! How the outputs of a family's text encoders make up its condition. One description serves the values of the cache and,
//! where a text encoder is trained, the variables of a tape.
//!
//! ```text
//! tokens [rows, width]   a band of rows after the other; in a band encoders side by side, then zeros
//! pooled [width]         encoders side by side
//! ```

use std::ops::Range;

use compute::{Tape, Var};

use super::{Condition, Conditions, NamedTensor, POOLED, TOKENS};
use crate::error::Result;
use crate::model::diffusion::text::{EmbeddingWidths, TextEmbedding};

/// What a family's condition is made of. Text encoders are given by their index among the family's.
#[derive(Clone, Copy, Debug)]
pub struct ConditionLayout {
    /// Width of a token.
    pub width: usize,
    /// The text encoders whose tokens each band of rows has.
    pub bands: &'static [&'static [usize]],
    /// Those whose pooled embeddings make a vector; none if the model takes none.
    pub pooled: &'static [usize],
}

/// The output of a text encoder.
#[derive(Clone, Copy, Debug)]
pub struct OutputShape {
    /// Tokens.
    pub rows: usize,
    /// Widths of a token and of the pooled embedding.
    pub widths: EmbeddingWidths,
}

/// What a trained text encoder gave for some samples.
pub struct TrainedOutput {
    /// Its index among the family's.
    pub index: usize,
    /// [samples, tokens, width]
    pub tokens: Var,
    /// [samples, width]
    pub pooled: Var,
}

/// Rows of a tensor, and who has which columns of them.
struct Band {
    rows: Range<usize>,
    parts: Vec<BandPart>,
}

/// Columns of a band: a text encoder's, or zeros.
struct BandPart {
    encoder: Option<usize>,
    columns: Range<usize>,
}

impl Band {
    /// Encoders of these indices and widths side by side, then zeros up to `width`.
    fn new(rows: Range<usize>, encoders: impl Iterator<Item = [usize; 2]>, width: usize) -> Self {
        let (mut parts, mut end) = (Vec::new(), 0);
        for [encoder, columns] in encoders {
            parts.push(BandPart { encoder: Some(encoder), columns: end..end + columns });
            end += columns;
        }
        parts.push(BandPart { encoder: None, columns: end..width });
        parts.retain(|part| !part.columns.is_empty());
        Self { rows, parts }
    }

    fn has(&self, encoder: usize) -> bool {
        self.parts.iter().any(|part| part.encoder == Some(encoder))
    }
}

impl ConditionLayout {
    /// The condition of a prompt from each text encoder's embedding and its number of tokens. The embedding of one that is
    /// left out is empty, and zeros stand for it.
    pub fn condition(&self, encoded: &[(usize, TextEmbedding)]) -> Condition {
        let is_alone = |index| self.bands.iter().any(|band| *band == [index]);
        let shape = |(index, (length, embedding)): (usize, &(usize, TextEmbedding))| {
            let (tokens, pooled) = (embedding.tokens.len(), embedding.pooled.len());
            // One that fills whole rows tells how many; those beside each other have as many as was said.
            let rows =
                if is_alone(index) && tokens > 0 { tokens / self.width.max(1) } else { *length };
            let widths = EmbeddingWidths { tokens: tokens / rows.max(1), pooled };
            OutputShape { rows, widths }
        };
        let shapes: Vec<OutputShape> = encoded.iter().enumerate().map(shape).collect();
        let n_rows = self.bands.iter().map(|band| shapes[band[0]].rows).sum::<usize>();
        let zeros = vec![0.0; n_rows * self.width];
        let mut tensors = vec![NamedTensor::new(TOKENS, &[self.width], zeros)];
        if !self.pooled.is_empty() {
            let width = self.pooled.iter().map(|index| shapes[*index].widths.pooled).sum();
            tensors.push(NamedTensor::new(POOLED, &[], vec![0.0; width]));
        }
        let mut condition = Condition(tensors);
        for (index, (_, embedding)) in encoded.iter().enumerate() {
            self.put(&mut condition, &shapes, index, embedding);
        }
        condition
    }

    /// Puts the embedding of one text encoder into a condition.
    pub fn put(
        &self,
        condition: &mut Condition,
        shapes: &[OutputShape],
        index: usize,
        embedding: &TextEmbedding,
    ) {
        for NamedTensor { name, sizes, values } in &mut condition.0 {
            let is_pooled = name == POOLED;
            let from = if is_pooled { &embedding.pooled } else { &embedding.tokens };
            let [n_rows, width] = if is_pooled { [1, sizes[0]] } else { [sizes[0], sizes[1]] };
            for Band { rows, parts } in self.bands_of(name, shapes, [n_rows, width]) {
                let own = parts.into_iter().filter(|part| part.encoder == Some(index));
                for BandPart { columns, .. } in own {
                    let rows = values[rows.start * width..rows.end * width].chunks_exact_mut(width);
                    for (to, from) in rows.zip(from.chunks_exact(columns.len())) {
                        to[columns.clone()].copy_from_slice(from);
                    }
                }
            }
        }
    }

    /// Conditions from the cache with what trained text encoders gave in its place.
    pub fn with_trained(
        &self,
        tape: &Tape<'_>,
        conditions: Conditions,
        shapes: &[OutputShape],
        trained: &[TrainedOutput],
    ) -> Result<Conditions> {
        let replaced = |name: &str, cached: Var| -> Result<Var> {
            let shape = cached.shape();
            let &[samples, .., width] = shape.sizes() else { unreachable!("it has samples") };
            let n_rows = shape.rows() / samples;
            let bands = self.bands_of(name, shapes, [n_rows, width]);
            if !trained.iter().any(|of| bands.iter().any(|band| band.has(of.index))) {
                return Ok(cached);
            }
            let cached = cached.reshape([samples, n_rows, width]);
            let of = |output: &TrainedOutput| {
                let of = if name == POOLED { &output.pooled } else { &output.tokens };
                of.reshape([samples, of.shape().rows() / samples, of.shape().width()])
            };
            let band = |band: &Band| {
                let rows = tape.split_tokens(&cached, band.rows.clone())?;
                let trained = trained.iter().filter(|output| band.has(output.index));
                let trained: Vec<_> = trained.map(|output| (output.index, of(output))).collect();
                if trained.is_empty() {
                    Ok(rows)
                } else {
                    with_columns(tape, &rows, band, &trained)
                }
            };
            let bands = bands.iter().map(band).collect::<Result<Vec<Var>>>()?;
            Ok(tape.concat_tokens(&bands.iter().collect::<Vec<_>>())?.reshape(shape))
        };
        conditions.try_map(replaced)
    }

    /// The bands of a tensor [rows, width]. The last has the rows that are left: only its number may differ from prompt to
    /// prompt.
    fn bands_of(
        &self,
        name: &str,
        shapes: &[OutputShape],
        [n_rows, width]: [usize; 2],
    ) -> Vec<Band> {
        if name == POOLED {
            let encoders = self.pooled.iter().map(|index| [*index, shapes[*index].widths.pooled]);
            return vec![Band::new(0..1, encoders, width)];
        }
        let (mut bands, mut first) = (Vec::new(), 0);
        for (number, band) in (1..).zip(self.bands) {
            let is_last = number == self.bands.len();
            let end = if is_last { n_rows } else { first + shapes[band[0]].rows };
            let encoders = band.iter().map(|index| [*index, shapes[*index].widths.tokens]);
            bands.push(Band::new(first..end, encoders, width));
            first = end;
        }
        // That of an encoder that sees no token.
        bands.retain(|band| !band.rows.is_empty());
        bands
    }
}

/// Rows [samples, rows, width] with other columns of some encoders.
fn with_columns(
    tape: &Tape<'_>,
    cached: &Var,
    band: &Band,
    trained: &[(usize, Var)],
) -> Result<Var> {
    let shape = cached.shape();
    let n = shape.rows();
    // Columns are tokens of pieces that all widths are multiples of.
    let piece = band.parts.iter().map(|part| part.columns.len()).fold(0, greatest_divisor);
    let pieces = |var: &Var| var.reshape([n, var.shape().width() / piece, piece]);
    let part = |BandPart { encoder, columns }: &BandPart| match trained
        .iter()
        .find(|(index, _)| Some(*index) == *encoder)
    {
        Some((_, output)) => Ok(pieces(output)),
        None => tape.split_tokens(&pieces(cached), columns.start / piece..columns.end / piece),
    };
    let parts = band.parts.iter().map(part).collect::<compute::Result<Vec<Var>>>()?;
    Ok(tape.concat_tokens(&parts.iter().collect::<Vec<_>>())?.reshape(shape))
}

fn greatest_divisor(a: usize, b: usize) -> usize {
    if b == 0 { a } else { greatest_divisor(b, a % b) }
}

#[cfg(test)]
mod tests {
    use compute::{Device, Dtype, Params};

    use super::*;

    /// As SD3 has it: two encoders side by side with a column of zeros, a third below.
    const LAYOUT: ConditionLayout =
        ConditionLayout { width: 6, bands: &[&[0, 1], &[2]], pooled: &[0, 1] };

    const fn shape(rows: usize, tokens: usize, pooled: usize) -> OutputShape {
        OutputShape { rows, widths: EmbeddingWidths { tokens, pooled } }
    }

    const SHAPES: [OutputShape; 3] = [shape(2, 2, 1), shape(2, 3, 2), shape(1, 6, 0)];

    /// Every value of an encoder's output tells whose it is and where it stands.
    fn embedding(index: usize, of: f32) -> (usize, TextEmbedding) {
        let OutputShape { rows, widths } = SHAPES[index];
        let values = |n: usize, from: f32| (0..n).map(|at| of + from + at as f32).collect();
        let (tokens, pooled) = (values(rows * widths.tokens, 0.0), values(widths.pooled, 50.0));
        (rows, TextEmbedding { tokens, pooled })
    }

    fn condition(of: [f32; 3]) -> Condition {
        let all = [0, 1, 2].map(|index| embedding(index, of[index]));
        LAYOUT.condition(&all)
    }

    #[test]
    fn encoders_stand_side_by_side_and_below_each_other() {
        let Condition(tensors) = condition([100.0, 200.0, 300.0]);
        let [tokens, pooled] = &tensors[..] else { panic!("{tensors:?}") };
        assert_eq!(tokens.sizes, [3, 6]);
        assert_eq!(tokens.values[..6], [100.0, 101.0, 200.0, 201.0, 202.0, 0.0]);
        assert_eq!(tokens.values[6..12], [102.0, 103.0, 203.0, 204.0, 205.0, 0.0]);
        assert_eq!(tokens.values[12..], [300.0, 301.0, 302.0, 303.0, 304.0, 305.0]);
        assert_eq!(pooled.values, [150.0, 250.0, 251.0]);
    }

    #[test]
    fn zeros_stand_for_an_encoder_that_is_left_out() {
        let none = (2, TextEmbedding::default());
        let Condition(tensors) = LAYOUT.condition(&[embedding(0, 1.0), embedding(1, 9.0), none]);
        assert_eq!(tensors[0].sizes, [4, 6]);
        assert!(tensors[0].values[12..].iter().all(|value| *value == 0.0));
    }

    /// On a tape and in values, one encoder or both of a band are replaced, and the rest stays.
    #[test]
    fn what_trained_encoders_give_stands_where_the_cache_had_it() {
        let device = Device::cpu(1, 1 << 20).unwrap();
        let params = Params::default();
        let tape = Tape::inference(&device, &params, 0);
        let cached = [condition([100.0, 200.0, 300.0]), condition([400.0, 500.0, 600.0])];
        for trained in [&[0][..], &[1], &[0, 1]] {
            let of = |base: f32, index: usize| {
                if trained.contains(&index) { base + 7.0 } else { base }
            };
            let wanted = [100.0, 400.0]
                .map(|first| condition([0, 1, 2].map(|i| of(first + 100.0 * i as f32, i))));
            let output = |index: &usize| {
                let of = [100.0, 400.0]
                    .map(|first| embedding(*index, first + 100.0 * *index as f32 + 7.0).1);
                let OutputShape { rows, widths } = SHAPES[*index];
                let upload = |sizes: &[usize], values: [&[f32]; 2]| {
                    let shape = compute::Shape::new(sizes);
                    Var::from(device.upload_parts(shape, &values, Dtype::F32).unwrap())
                };
                let [a, b] = &of;
                TrainedOutput {
                    index: *index,
                    tokens: upload(&[2, rows, widths.tokens], [&a.tokens, &b.tokens]),
                    pooled: upload(&[2, widths.pooled], [&a.pooled, &b.pooled]),
                }
            };
            let outputs: Vec<_> = trained.iter().map(output).collect();
            let all: Vec<&Condition> = cached.iter().collect();
            let uploaded = Conditions::upload(&device, &all, Dtype::F32).unwrap();
            let found = LAYOUT.with_trained(&tape, uploaded, &SHAPES, &outputs).unwrap();
            for (at, name) in [TOKENS, POOLED].into_iter().enumerate() {
                let wanted = [0, 1].map(|sample| wanted[sample].0[at].values.clone()).concat();
                let found = found.get(name).unwrap();
                assert_eq!(found.tensor().read_f32().unwrap(), wanted, "{trained:?} {name}");
            }
            let mut first = cached[0].clone();
            for index in trained {
                let (_, embedding) = embedding(*index, 100.0 + 100.0 * *index as f32 + 7.0);
                LAYOUT.put(&mut first, &SHAPES, *index, &embedding);
            }
            assert_eq!(first, wanted[0], "{trained:?}");
        }
    }
}
