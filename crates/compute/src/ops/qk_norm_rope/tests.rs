//! Norm and rotation of heads against their formulas, and tables against angles by hand.

use super::{QkNormRope, Rope, RopeAxis, RopePairs, rope_table};
use crate::ops::Activation;
use crate::ops::activation::tests::exact as active;
use crate::ops::rms_norm::tests::normalised;
use crate::testing::{Dual, Input, check, check_gpu, device, for_random_sizes, recomputed};
use crate::{Dtype, Gradients, Params, Result, Shape, Tape, Var};

const EPSILON: f64 = 1e-3;

/// What a test does to queries [samples, tokens, heads·d].
#[derive(Clone)]
struct Case {
    sizes: [usize; 3],
    n_heads: usize,
    has_norm: bool,
    pairs: Option<RopePairs>,
    /// The shape of the table without its width, and its numbers.
    table: (Vec<usize>, Vec<f32>),
}

impl Case {
    /// With a table of one axis that samples share, at positions 0, 1, ..
    fn new([samples, tokens, n_heads, d]: [usize; 4]) -> Self {
        let positions: Vec<f32> = (0..tokens).map(|token| token as f32).collect();
        Self {
            sizes: [samples, tokens, n_heads * d],
            n_heads,
            has_norm: true,
            pairs: Some(RopePairs::Interleaved),
            table: (vec![tokens], rope_table(&[RopeAxis::new(d, 100.0)], &positions)),
        }
    }

    fn head_width(&self) -> usize {
        self.sizes[2] / self.n_heads
    }

    /// With the same table for the first `rotary` numbers of a head alone.
    fn in_part(self, rotary: usize) -> Self {
        let positions: Vec<f32> = (0..self.sizes[1]).map(|token| token as f32).collect();
        let table = rope_table(&[RopeAxis::new(rotary, 100.0)], &positions);
        Self { table: (vec![self.sizes[1]], table), ..self }
    }

    fn rotary_width(&self) -> usize {
        match self.table.0.iter().product() {
            0 => self.head_width(),
            rows => self.table.1.len() / rows,
        }
    }

    fn inputs(&self) -> [Input; 2] {
        let x = Input::normal(self.sizes, 1).scaled(2.0);
        let weight = Input::normal([self.head_width()], 2).f32();
        [x, if self.has_norm { weight } else { weight.frozen() }]
    }

    fn op(&self, tape: &Tape<'_>, v: &[Var]) -> Result<Var> {
        let sizes = [&self.table.0[..], &[self.rotary_width()]].concat();
        let upload = |_| tape.device().upload(Shape::new(&sizes), &self.table.1);
        let table = self.pairs.map(upload).transpose()?;
        let heads = QkNormRope {
            n_heads: self.n_heads,
            norm: self.has_norm.then_some((&v[1], EPSILON as f32)),
            rope: table.as_ref().zip(self.pairs).map(|(table, pairs)| Rope { table, pairs }),
        };
        tape.qk_norm_rope(&v[0], heads)
    }

    fn exact(&self, v: &[Vec<Dual>]) -> Vec<Dual> {
        let d = self.head_width();
        let mut y = v[0].clone();
        if self.has_norm {
            let rows = normalised(&y, d, EPSILON).into_iter();
            y = rows.zip(v[1].iter().cycle()).map(|(x, weight)| x * *weight).collect();
        }
        if let Some(pairs) = self.pairs {
            let rotary = self.rotary_width();
            for (index, head) in y.chunks_mut(d).enumerate() {
                let start = index / self.n_heads * rotary % self.table.1.len();
                rotated(&mut head[..rotary], &self.table.1[start..start + rotary], pairs);
            }
        }
        y
    }

    fn check(&self) {
        check(&self.inputs(), 4.0, &|tape, v| self.op(tape, v), &|v| self.exact(v));
    }
}

/// Each pair as a complex number, times cos + i·sin.
fn rotated(head: &mut [Dual], angles: &[f32], pairs: RopePairs) {
    let d = head.len();
    for (pair, angle) in angles.chunks(2).enumerate() {
        let (real, imaginary) = match pairs {
            RopePairs::Interleaved => (2 * pair, 2 * pair + 1),
            RopePairs::HalfSplit => (pair, pair + d / 2),
        };
        let (a, b) = (head[real], head[imaginary]);
        let (cos, sin) = (f64::from(angle[0]), f64::from(angle[1]));
        head[real] = a * cos - b * sin;
        head[imaginary] = a * sin + b * cos;
    }
}

#[test]
fn every_combination_of_parts() {
    for sizes in [[2, 3, 2, 6], [1, 1, 1, 2], [1, 2, 3, 10]] {
        for has_norm in [true, false] {
            for pairs in [Some(RopePairs::Interleaved), Some(RopePairs::HalfSplit), None] {
                Case { has_norm, pairs, ..Case::new(sizes) }.check();
            }
        }
    }
    // Odd heads can be normalised.
    Case { pairs: None, ..Case::new([2, 2, 3, 5]) }.check();
}

#[test]
fn random_sizes() {
    for_random_sizes(8, [2, 3, 3, 5], |[samples, tokens, n_heads, half]| {
        let pairs = if tokens > 1 { RopePairs::HalfSplit } else { RopePairs::Interleaved };
        let case = Case::new([samples, tokens, n_heads, 2 * half]);
        Case { pairs: Some(pairs), has_norm: half > 1, ..case }.check();
    });
}

#[test]
fn heads_wider_than_vectors() {
    for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
        Case { pairs: Some(pairs), ..Case::new([1, 2, 2, 34]) }.check();
    }
}

#[test]
fn the_weight_sees_every_block_of_tokens() {
    Case::new([2, 19, 2, 2]).check();
}

#[test]
fn with_tables_of_several_axes_and_of_each_sample() {
    let (samples, tokens, d) = (2, 3, 8);
    let axes = [RopeAxis::new(2, 100.0), RopeAxis::new(4, 100.0), RopeAxis::new(2, 7.0)];
    let of = |sample: i16, token: i16| [f32::from(sample), f32::from(token), f32::from(1 - token)];
    let positions: Vec<f32> =
        (0..2).flat_map(|sample| (0..3).flat_map(move |token| of(sample, token))).collect();
    let table = (vec![samples, tokens], rope_table(&axes, &positions));
    for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
        let case = Case::new([samples, tokens, 2, d]);
        Case { pairs: Some(pairs), table: table.clone(), ..case }.check();
    }
}

#[test]
fn heads_are_turned_in_part() {
    for pairs in [RopePairs::Interleaved, RopePairs::HalfSplit] {
        for has_norm in [true, false] {
            let case = Case::new([2, 3, 2, 10]).in_part(4);
            Case { has_norm, pairs: Some(pairs), ..case }.check();
        }
    }
}

#[test]
fn with_one_side_frozen() {
    let case = Case::new([1, 2, 2, 4]);
    let [x, weight] = case.inputs();
    for inputs in [[x.clone().frozen(), weight.clone()], [x, weight.frozen()]] {
        check(&inputs, 4.0, &|tape, v| case.op(tape, v), &|v| case.exact(v));
    }
}

#[test]
fn gradients_add_to_what_is_there() {
    let case = Case::new([1, 3, 2, 4]);
    check(
        &case.inputs(),
        4.0,
        &|tape, v| tape.add(&tape.add(&v[0], &case.op(tape, v)?)?, &case.op(tape, v)?),
        &|v| v[0].iter().zip(case.exact(v)).map(|(x, y)| *x + y + y).collect(),
    );
}

#[test]
fn readers_recompute_the_result() {
    let case = Case::new([1, 3, 2, 4]);
    let block = {
        let case = case.clone();
        move |tape: &Tape<'_>, v: &[Var]| {
            let (x, weight) = (tape.scale(&v[0], 0.5)?, tape.scale(&v[1], 2.0)?);
            tape.glu(&case.op(tape, &[x, weight])?, &v[2], Activation::Silu)
        }
    };
    let exact = |v: &[Vec<Dual>]| -> Vec<Dual> {
        let scaled = |x: &[Dual], factor: f64| x.iter().map(|x| *x * factor).collect();
        let gates = case.exact(&[scaled(&v[0], 0.5), scaled(&v[1], 2.0)]).into_iter();
        gates.zip(&v[2]).map(|(gate, up)| active(Activation::Silu, gate) * *up).collect()
    };
    let ([x, weight], up) = (case.inputs(), Input::normal([1, 3, 8], 3));
    let frozen = [x.clone().frozen(), weight.clone().frozen(), up.clone()];
    for inputs in [[x, weight, up], frozen] {
        check(&inputs, 4.0, &block, &exact);
        check(&inputs, 4.0, &recomputed(block.clone()), &exact);
    }
}

#[test]
fn without_a_norm_nothing_is_kept() {
    let device = device();
    let mut params = Params::default();
    let x = params.add(device.zeros([1, 8, 16], Dtype::F32).unwrap());
    let case = Case { has_norm: false, ..Case::new([1, 8, 2, 8]) };
    let tape = Tape::training(&device, &params, 0);
    let x = tape.scale(&tape.param(x), 2.0).unwrap();
    let before = device.usage().in_use;
    let bytes = x.tensor().bytes();
    drop(case.op(&tape, &[x.clone(), x]).unwrap());
    let table = case.table.1.len() * 4;
    assert_eq!(device.usage().in_use + bytes, before + table);
    // A software GPU is still compiling, and crashes if the process ends meanwhile.
    device.synchronise().unwrap();
}

#[test]
fn neither_part_leaves_everything_as_it_is() {
    let case = Case { has_norm: false, pairs: None, ..Case::new([1, 2, 2, 4]) };
    check(&case.inputs(), 1.0, &|tape, v| tape.scale(&case.op(tape, v)?, 1.0), &|v| v[0].clone());
}

#[test]
fn nothing_stays_nothing() {
    for sizes in [[0, 2, 2, 4], [2, 0, 2, 4], [2, 2, 3, 0]] {
        let case = Case::new(sizes);
        check(&case.inputs(), 1.0, &|tape, v| case.op(tape, v), &|_| vec![]);
    }
}

#[test]
fn nan_spoils_its_head() {
    let device = device();
    let mut params = Params::default();
    let mut numbers = vec![1.0f32; 24];
    numbers[9] = f32::NAN;
    let x = params.add(device.upload([1, 2, 12], &numbers).unwrap());
    let weight = Var::from(device.upload([4], &[1.0f32; 4]).unwrap());
    for has_norm in [true, false] {
        let case = Case { has_norm, ..Case::new([1, 2, 3, 4]) };
        let tape = Tape::training(&device, &params, 0);
        let y = case.op(&tape, &[tape.param(x), weight.clone()]).unwrap();
        let spoilt = |y: Vec<f32>| -> Vec<usize> {
            (0..y.len()).filter(|index| y[*index].is_nan()).collect()
        };
        let expected = if has_norm { vec![8, 9, 10, 11] } else { vec![8, 9] };
        assert_eq!(spoilt(y.tensor().to_vec()), expected);
        let mut gradients = Gradients::default();
        let gradient = device.upload([1, 2, 12], &numbers).unwrap();
        tape.backward_from(y, gradient, &mut gradients).unwrap();
        assert_eq!(spoilt(gradients.get(x).unwrap().to_vec()), expected);
    }
}

#[test]
fn what_does_not_fit_is_said_with_both_shapes() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: &[usize]| device.zeros(Shape::new(sizes), Dtype::F32).unwrap();
    let vars = |sizes: &[usize]| Var::from(zeros(sizes));
    let says = |x: &[usize], n_heads: usize, weight: &[usize], table: &[usize]| {
        let (weight, table) = (vars(weight), zeros(table));
        let rope = Some(Rope { table: &table, pairs: RopePairs::HalfSplit });
        let heads = QkNormRope { n_heads, norm: Some((&weight, 1e-6)), rope };
        let error = tape.qk_norm_rope(&vars(x), heads).err().unwrap().to_string();
        error.strip_prefix("qk_norm_rope: ").unwrap().to_string()
    };
    let x = [2, 3, 12];
    assert_eq!(says(&x, 5, &[4], &[3, 4]), "width of x 12 is not a multiple of 5");
    assert_eq!(says(&x, 0, &[4], &[3, 4]), "width of x 12 is not a multiple of 0");
    assert_eq!(says(&x, 4, &[3], &[3, 3]), "width of table 3 is not a multiple of 2");
    let too_wide = "width of table is 6, expected 2 to the width of a head, 4";
    assert_eq!(says(&x, 3, &[4], &[3, 6]), too_wide);
    assert_eq!(says(&x, 3, &[12], &[3, 4]), "weight has shape [12], expected [4]");
    assert_eq!(says(&x, 3, &[4], &[5, 4]), "table has shape [5, 4], expected [3, 4]");
    assert_eq!(says(&x, 3, &[4], &[1, 3, 4]), "table has shape [1, 3, 4], expected [2, 3, 4]");
    assert_eq!(says(&[2, 12], 3, &[4], &[2, 4]), "x of shape [2, 12] has 2 dimensions, expected 3");
}

fn expect_table(axes: &[RopeAxis], positions: &[f32], expected: &[f32]) {
    let table = rope_table(axes, positions);
    assert_eq!(table.len(), expected.len());
    let is_close = table.iter().zip(expected).all(|(ours, exact)| (ours - exact).abs() < 1e-7);
    assert!(is_close, "{table:?}\n{expected:?}");
}

#[test]
fn a_table_holds_the_angles_of_each_axis() {
    // 10000^(-2i/4): 1 and 1/100.
    let one = RopeAxis::new(4, 10_000.0);
    let expected = [
        [1.0, 0.0, 1.0, 0.0],
        [0.540_302_3, 0.841_470_98, 0.999_95, 0.009_999_833],
        [-0.416_146_84, -0.909_297_4, 0.999_8, -0.019_998_667],
    ];
    expect_table(std::slice::from_ref(&one), &[0.0, 1.0, -2.0], &expected.concat());

    let quarter = RopeAxis { frequencies: vec![std::f64::consts::FRAC_PI_2] };
    let half = RopeAxis { frequencies: vec![std::f64::consts::PI] };
    let expected = [
        [0.0, 1.0, 0.540_302_3, 0.841_470_98, 0.999_95, 0.009_999_833],
        [0.0, -1.0, 1.0, 0.0, 1.0, 0.0],
    ];
    expect_table(&[quarter.clone(), one], &[1.0, 1.0, -1.0, 0.0], &expected.concat());
    let expected = [[1.0, 0.0, -1.0, 0.0, -1.0, 0.0], [0.0, -1.0, 1.0, 0.0, 0.0, 1.0]].concat();
    expect_table(&[quarter.clone(), half, quarter], &[0.0, 1.0, 2.0, -1.0, 2.0, 1.0], &expected);
    expect_table(&[], &[], &[]);
}

#[test]
fn far_positions_keep_their_angles() {
    // The cos and sin of 10000.3, which as f32 would be 10000.2998.
    let axis = RopeAxis { frequencies: vec![0.1] };
    expect_table(&[axis], &[100_003.0], &[-0.819_313_5, -0.573_345_7]);
}

#[test]
#[should_panic(expected = "3 positions on 2 axes")]
fn a_table_needs_a_position_on_every_axis() {
    rope_table(&[RopeAxis::new(2, 10.0), RopeAxis::new(2, 10.0)], &[0.0; 3]);
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_wide_heads() {
    for d in [16, 64, 128] {
        for pairs in [None, Some(RopePairs::Interleaved), Some(RopePairs::HalfSplit)] {
            for has_norm in [true, false] {
                let case = Case { has_norm, pairs, ..Case::new([2, 5, 3, d]) };
                if has_norm || pairs.is_some() {
                    check_gpu(&case.inputs(), 8.0, &|tape, v| case.op(tape, v));
                    let case = case.in_part(d / 4 * 3);
                    check_gpu(&case.inputs(), 8.0, &|tape, v| case.op(tape, v));
                }
            }
        }
    }
}

/// Streams of other lengths, one with a norm that is trained or frozen, one without a rotation. In place, and of several
/// samples.
#[test]
fn streams_are_put_together() {
    for samples in [1, 2] {
        for is_frozen in [true, false] {
            let first = Case::new([samples, 5, 2, 6]);
            let second = Case { pairs: None, ..Case::new([samples, 3, 2, 6]) };
            let [x, weight] = first.inputs();
            let inputs = [x, if is_frozen { weight.frozen() } else { weight }];
            let inputs = [&inputs[..], &second.inputs().map(Input::frozen)].concat();
            let op = |tape: &Tape<'_>, v: &[Var]| {
                let table = tape.device().upload([5, 6], &first.table.1)?;
                let rope = Some(Rope { table: &table, pairs: RopePairs::Interleaved });
                let heads = |weight, rope| QkNormRope {
                    n_heads: 2,
                    norm: Some((weight, EPSILON as f32)),
                    rope,
                };
                let streams = [(&v[0], heads(&v[1], rope)), (&v[2], heads(&v[3], None))];
                tape.qk_norm_rope_concat(&streams)
            };
            check(&inputs, 4.0, &op, &|v| {
                let (a, b) = (first.exact(&v[..2]), second.exact(&v[2..]));
                let parts = a.chunks(5 * 12).zip(b.chunks(3 * 12));
                parts.flat_map(|(a, b)| [a, b].concat()).collect()
            });
        }
    }
}
