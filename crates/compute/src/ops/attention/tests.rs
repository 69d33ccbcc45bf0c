//! Attention against its formula: full, causal, grouped, ragged, packed, and with distances that count.

use super::Attention;
use crate::testing::{
    Dual, Input, check, check_forward, check_gpu, device, for_random_sizes, upload,
};
use crate::{Device, DeviceKind, Dtype, Params, Tape, Var};

#[derive(Clone, Copy)]
struct Case {
    samples: usize,
    queries: usize,
    keys: usize,
    heads: usize,
    kv_heads: usize,
    d: usize,
    is_causal: bool,
    lengths: Option<&'static [u32]>,
    /// The first key that a query of a sample sees.
    first: Option<fn(usize, usize) -> u32>,
    is_relative: bool,
}

const CASE: Case = Case {
    samples: 2,
    queries: 3,
    keys: 4,
    heads: 2,
    kv_heads: 2,
    d: 3,
    is_causal: false,
    lengths: None,
    first: None,
    is_relative: false,
};

/// Where the document of a query begins: documents of three tokens.
fn threes(_: usize, query: usize) -> u32 {
    query as u32 / 3 * 3
}

/// Documents of 7 tokens, and of 30 in the second sample.
fn sevens_and_thirties(sample: usize, query: usize) -> u32 {
    let length = [7, 30][sample];
    query as u32 / length * length
}

impl Case {
    fn inputs(self) -> [Input; 3] {
        let kv = [self.samples, self.keys, self.kv_heads * self.d];
        [
            Input::normal([self.samples, self.queries, self.heads * self.d], 1),
            Input::normal(kv, 2),
            Input::normal(kv, 3),
        ]
    }

    fn relative(self) -> Option<Input> {
        let shape = [self.heads, self.queries + self.keys - 1];
        self.is_relative.then(|| Input::normal(shape, 7).f32())
    }

    fn run(self, tape: &Tape<'_>, v: &[Var]) -> crate::Result<Var> {
        let lengths = self.lengths.map(|all| tape.device().upload([all.len()], all).unwrap());
        let relative = self.relative().map(|all| upload(tape.device(), &all, Dtype::F32));
        let first = self.first.map(|first| {
            let of = |token| first(token / self.queries, token % self.queries);
            let all: Vec<u32> = (0..self.samples * self.queries).map(of).collect();
            tape.device().upload([self.samples, self.queries], &all).unwrap()
        });
        let how = Attention {
            n_kv_heads: self.kv_heads,
            is_causal: self.is_causal,
            key_lengths: lengths.as_ref(),
            first_keys: first.as_ref(),
            relative_bias: relative.as_ref(),
            ..Attention::full(self.heads, self.d)
        };
        tape.attention(&v[0], &v[1], &v[2], how)
    }

    fn is_seen(self, sample: usize, query: usize, key: usize) -> bool {
        let length = self.lengths.map_or(self.keys, |all| all[sample] as usize);
        let first = self.first.map_or(0, |first| first(sample, query) as usize);
        let is_past = key + self.queries <= self.keys + query;
        first <= key && key < length && (is_past || !self.is_causal)
    }

    fn exact(self, v: &[Vec<Dual>]) -> Vec<Dual> {
        let Self { queries, keys, heads, kv_heads, d, .. } = self;
        let row = |of: &'_ [Dual], token: usize, heads: usize, head: usize| {
            of[(token * heads + head) * d..][..d].to_vec()
        };
        let relative = self.relative();
        let mut out = Vec::new();
        for token in 0..self.samples * queries {
            let (sample, query) = (token / queries, token % queries);
            for head in 0..heads {
                let q = row(&v[0], token, heads, head);
                let kv = |of: &[Dual], key| {
                    row(of, sample * keys + key, kv_heads, head * kv_heads / heads)
                };
                let weights: Vec<Dual> = (0..keys)
                    .map(|key| {
                        if !self.is_seen(sample, query, key) {
                            return Dual::default();
                        }
                        let k = kv(&v[1], key);
                        let score: Dual = q.iter().zip(k).map(|(q, k)| *q * k).sum();
                        let place = head * (queries + keys - 1) + key + queries - 1 - query;
                        let added = relative.as_ref().map_or(0.0, |all| all.values[place]);
                        (score * (1.0 / (d as f64).sqrt()) + f64::from(added).into()).exp()
                    })
                    .collect();
                let total: Dual = weights.iter().copied().sum();
                // Of no weights at all, zeros.
                let total = if total.value == 0.0 { 1.0.into() } else { total };
                out.extend((0..d).map(|column| {
                    let sum = weights
                        .iter()
                        .enumerate()
                        .map(|(key, w)| *w / total * kv(&v[2], key)[column]);
                    sum.sum::<Dual>()
                }));
            }
        }
        out
    }

    fn check(self) {
        check(&self.inputs(), 8.0, &|tape, v| self.run(tape, v), &|v| self.exact(v));
    }
}

#[test]
fn every_query_sees_every_key() {
    CASE.check();
    Case { samples: 1, queries: 1, keys: 1, heads: 1, kv_heads: 1, d: 1, ..CASE }.check();
    Case { samples: 1, queries: 5, keys: 2, heads: 1, kv_heads: 1, d: 8, ..CASE }.check();
}

#[test]
fn causal_counts_from_the_end() {
    Case { queries: 4, is_causal: true, ..CASE }.check();
    Case { queries: 2, keys: 5, is_causal: true, ..CASE }.check();
}

#[test]
fn heads_of_keys_are_shared() {
    Case { samples: 1, heads: 4, kv_heads: 2, ..CASE }.check();
    Case { samples: 1, heads: 3, kv_heads: 1, is_causal: true, queries: 4, ..CASE }.check();
}

#[test]
fn samples_have_lengths_of_their_own() {
    Case { lengths: Some(&[4, 2]), ..CASE }.check();
    Case { lengths: Some(&[1, 3]), queries: 4, is_causal: true, ..CASE }.check();
    // A sample without keys gives zeros and passes nothing on.
    Case { lengths: Some(&[0, 2]), ..CASE }.check();
}

#[test]
fn documents_do_not_see_each_other() {
    let packed = Case { queries: 7, keys: 7, is_causal: true, first: Some(threes), ..CASE };
    packed.check();
    Case { samples: 1, heads: 4, kv_heads: 2, d: 2, ..packed }.check();
    Case { lengths: Some(&[7, 4]), is_relative: true, ..packed }.check();
    Case { is_causal: false, keys: 8, ..packed }.check();
    // In any order, and beyond what is there to be seen.
    let first: fn(usize, usize) -> u32 = |sample, query| [[3, 0, 2], [4, 1, 0]][sample][query];
    Case { first: Some(first), ..CASE }.check();
    Case { first: Some(first), is_causal: true, ..CASE }.check();
}

#[test]
fn packed_documents_are_as_they_are_apart() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    // Of more than a block, and less; in tests a block has 8 queries and 16 keys.
    let (n_tokens, width, lengths) = (60, 4, [5, 21, 1, 33]);
    let inputs = [1, 2, 3].map(|seed| Input::normal([1, n_tokens, width], seed));
    let how = Attention { is_causal: true, ..Attention::full(2, 2) };
    let of = |from: usize, count: usize, how| {
        let [q, k, v] = inputs.each_ref().map(|all| {
            let part = &all.values[from * width..][..count * width];
            Var::from(device.upload([1, count, width], part).unwrap())
        });
        tape.attention(&q, &k, &v, how).unwrap().tensor().to_vec::<f32>()
    };
    let (mut first_keys, mut apart) = (Vec::new(), Vec::new());
    for length in lengths {
        let from = first_keys.len();
        first_keys.extend(vec![from as u32; length]);
        apart.extend(of(from, length, how));
    }
    let first_keys = device.upload([1, n_tokens], &first_keys).unwrap();
    let packed = of(0, n_tokens, Attention { first_keys: Some(&first_keys), ..how });
    let largest = packed.iter().zip(&apart).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
    assert!(largest < 1e-6, "{largest}");
    assert!(packed != of(0, n_tokens, how));
}

/// A window changes what is counted, and not what is computed: first keys say which keys are seen.
#[test]
fn a_window_is_counted_and_kept() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.upload([1, 9, 4], &[0.5f32; 36]).unwrap());
    let first_keys: Vec<u32> = (0..9u32).map(|query| query.saturating_sub(2)).collect();
    let first_keys = device.upload([1, 9], &first_keys).unwrap();
    let causal = Attention { is_causal: true, ..Attention::full(2, 2) };
    let how = Attention { first_keys: Some(&first_keys), ..causal };
    let flops = |how: Attention<'_>| {
        let before = device.work();
        tape.attention(&x, &x, &x, how).unwrap();
        device.work().since(&before).flops
    };
    assert_eq!(flops(how), 3 * flops(Attention { window: Some(3), ..how }));
    let error = tape.attention(&x, &x, &x, Attention { window: Some(2), ..how }).err().unwrap();
    let expected =
        "attention: number of keys that a query sees is 3, expected at most the window, 2";
    assert_eq!(error.to_string(), expected);
    assert!(tape.attention(&x, &x, &x, Attention { window: Some(3), ..causal }).is_err());
    assert!(tape.attention(&x, &x, &x, Attention { window: Some(9), ..causal }).is_ok());
}

#[test]
fn distances_count() {
    let case = Case { is_relative: true, ..CASE };
    case.check();
    Case { samples: 1, queries: 5, keys: 2, heads: 1, kv_heads: 1, ..case }.check();
    Case { samples: 1, heads: 4, kv_heads: 2, lengths: Some(&[3]), ..case }.check();
    Case { queries: 4, is_causal: true, lengths: Some(&[4, 2]), ..case }.check();
}

#[test]
fn random_sizes_and_masks() {
    for_random_sizes(10, [2, 4, 3, 2, 2, 4, 4], |[samples, queries, more, kv, group, d, mask]| {
        let (is_causal, keys) = (mask % 2 == 0, queries + more - 1);
        let lengths: Option<&[u32]> = if mask > 2 { Some(&[2, 1]) } else { None };
        let lengths = lengths.map(|all| &all[..samples]).filter(|_| keys > 1);
        let (heads, kv_heads) = (kv * group, kv);
        let is_relative = mask == 1 || mask == 4;
        let first = if queries > 2 { Some(threes as fn(usize, usize) -> u32) } else { None };
        Case { samples, queries, keys, heads, kv_heads, d, is_causal, lengths, first, is_relative }
            .check();
    });
}

#[test]
fn nothing_gives_nothing() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    for sizes in [[0, 3, 4], [2, 0, 4]] {
        let x = Var::from(device.zeros(sizes, Dtype::F32).unwrap());
        assert_eq!(
            tape.attention(&x, &x, &x, Attention::full(2, 2)).unwrap().shape(),
            sizes.into()
        );
    }
    // Queries without any key at all, though with distances.
    let (q, k) = ([1, 2, 4], [1, 0, 4]);
    let [q, k] = [q, k].map(|sizes| Var::from(device.zeros(sizes, Dtype::F32).unwrap()));
    let relative = device.zeros([2, 1], Dtype::F32).unwrap();
    let how = Attention { relative_bias: Some(&relative), ..Attention::full(2, 2) };
    let out = tape.attention(&q, &k, &k, how).unwrap();
    assert_eq!(out.tensor().to_vec::<f32>(), [0.0; 8]);
}

#[test]
fn more_tokens_than_a_block() {
    // In tests a block has 8 queries and 16 keys. A reference of all slopes would take long: few
    // numbers are trained, those of linear layers before.
    let (queries, keys, d) = (19, 50, 2);
    let how = Case { samples: 1, queries, keys, heads: 1, kv_heads: 1, d, ..CASE };
    let relative = Case { heads: 2, is_relative: true, ..how };
    for how in [
        how,
        Case { is_causal: true, ..how },
        relative,
        Case { is_causal: true, lengths: Some(&[41]), ..relative },
        Case { first: Some(|_, query| query as u32 / 5 * 16), ..relative },
        Case { first: Some(|_, query| query as u32 / 9 * 18), is_causal: true, ..how },
    ] {
        let inputs = [
            Input::normal([1, queries * how.heads, d], 1).frozen(),
            Input::normal([1, keys, d], 2).frozen(),
            Input::normal([1, keys, d], 3).frozen(),
            Input::normal([d, d], 4).scaled(0.4),
            Input::normal([d, d], 5).scaled(0.4),
            Input::normal([d, d], 6).scaled(0.4),
        ];
        let mapped = |x: &[Dual], w: &[Dual]| -> Vec<Dual> {
            let row = |x: &[Dual]| [x[0] * w[0] + x[1] * w[1], x[0] * w[2] + x[1] * w[3]];
            x.chunks(2).flat_map(row).collect()
        };
        crate::testing::check_f32(
            &inputs,
            64.0,
            &|tape, v| {
                let map = |x: &Var, w: &Var| tape.linear(x, crate::ops::Linear::new(w)).unwrap();
                let q = map(&v[0], &v[3]).reshape([1, queries, how.heads * d]);
                how.run(tape, &[q, map(&v[1], &v[4]), map(&v[2], &v[5])])
            },
            &|v| how.exact(&[mapped(&v[0], &v[3]), mapped(&v[1], &v[4]), mapped(&v[2], &v[5])]),
        );
    }
}

#[test]
fn memory_grows_with_tokens_not_with_their_square() {
    let peak = |tokens: usize| {
        let device = Device::meta(DeviceKind::cpu(2), usize::MAX);
        let params = Params::default();
        let tape = Tape::training(&device, &params, 0);
        let tensor = || tape.leaf(device.zeros([1, tokens, 128], Dtype::Bf16).unwrap());
        let (q, k, v) = (tensor(), tensor(), tensor());
        let out = tape.attention(&q, &k, &v, Attention::full(2, 64)).unwrap();
        let gradient = device.zeros([1, tokens, 128], Dtype::Bf16).unwrap();
        tape.backward_from(out, gradient, &mut crate::Gradients::default()).unwrap();
        device.usage().peak
    };
    let (once, twice, thrice) = (peak(8192), peak(16384), peak(24576));
    assert_eq!(thrice - twice, twice - once);
}

#[test]
fn nan_is_not_hidden() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    for (poisoned, value) in [(0, f32::NAN), (1, f32::NAN), (2, f32::NAN), (2, f32::INFINITY)] {
        let inputs: Vec<Var> = CASE
            .inputs()
            .into_iter()
            .enumerate()
            .map(|(index, mut input)| {
                if index == poisoned {
                    input.values[0] = value;
                }
                Var::from(upload(&device, &input, Dtype::F32))
            })
            .collect();
        let out = CASE.run(&tape, &inputs).unwrap().tensor().to_vec::<f32>();
        assert!(!out[0].is_finite(), "{poisoned} {out:?}");
        assert!(out[CASE.queries * CASE.heads * CASE.d..].iter().all(|value| value.is_finite()));
    }
}

#[test]
fn a_nan_distance_is_not_hidden() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::inference(&device, &params, 0);
    let x = Var::from(device.zeros([1, 2, 2], Dtype::F32).unwrap());
    for (place, spoiled) in [(0, [false, true]), (1, [true, true]), (2, [true, false])] {
        let mut numbers = [0.0f32; 3];
        numbers[place] = f32::NAN;
        let relative = device.upload([1, 3], &numbers).unwrap();
        let how = Attention { relative_bias: Some(&relative), ..Attention::full(1, 2) };
        let out = tape.attention(&x, &x, &x, how).unwrap().tensor().to_vec::<f32>();
        assert_eq!([out[0].is_nan(), out[2].is_nan()], spoiled);
    }
}

#[test]
fn what_does_not_fit_is_said() {
    let device = device();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let zeros = |sizes: [usize; 3]| Var::from(device.zeros(sizes, Dtype::F32).unwrap());
    let (q, k, v) = (zeros([1, 3, 8]), zeros([1, 5, 8]), zeros([1, 4, 8]));
    let message = |how: Attention<'_>, k: &Var, v: &Var| {
        tape.attention(&q, k, v, how).err().unwrap().to_string()
    };
    let full = Attention::full(2, 4);
    assert_eq!(message(full, &k, &v), "attention: v has shape [1, 4, 8], expected [1, 5, 8]");
    let three = Attention::full(3, 4);
    assert_eq!(message(three, &k, &k), "attention: width of q 8 is not a multiple of 3");
    let two = zeros([1, 2, 8]);
    assert_eq!(
        message(Attention { is_causal: true, ..full }, &two, &two),
        "attention: number of queries is 3, expected at most the number of keys, 2, when causal"
    );
    let lengths = device.upload([1], &[6u32]).unwrap();
    assert_eq!(
        message(Attention { key_lengths: Some(&lengths), ..full }, &k, &k),
        "attention: key length is 6, expected at most the number of keys, 5"
    );
    let first = device.upload([1, 3], &[0u32, 6, 1]).unwrap();
    assert_eq!(
        message(Attention { first_keys: Some(&first), ..full }, &k, &k),
        "attention: first key is 6, expected at most the number of keys, 5"
    );
    let first = device.upload([3], &[0u32; 3]).unwrap();
    assert_eq!(
        message(Attention { first_keys: Some(&first), ..full }, &k, &k),
        "attention: first keys has shape [3], expected [1, 3]"
    );
    let relative = device.zeros([2, 8], Dtype::F32).unwrap();
    assert_eq!(
        message(Attention { relative_bias: Some(&relative), ..full }, &k, &k),
        "attention: relative has shape [2, 8], expected [2, 7]"
    );
    let relative = device.zeros([2, 7], Dtype::Bf16).unwrap();
    assert_eq!(
        message(Attention { relative_bias: Some(&relative), ..full }, &k, &k),
        "attention: relative is bf16, expected f32"
    );
}

#[test]
fn a_gpu_agrees_with_the_cpu_on_wide_heads() {
    let wide = Case { queries: 200, keys: 200, d: 64, ..CASE };
    let grouped = Case { queries: 150, keys: 300, heads: 4, d: 128, is_causal: true, ..wide };
    let cases = [
        wide,
        Case { queries: 130, keys: 70, ..wide },
        Case { d: 128, ..wide },
        Case { d: 40, ..wide },
        Case { d: 80, ..grouped },
        Case { is_causal: true, ..wide },
        Case { is_causal: true, first: Some(|_, _| 0), d: 128, ..wide },
        Case { is_causal: true, heads: 4, kv_heads: 2, ..wide },
        Case { heads: 6, kv_heads: 2, d: 128, ..wide },
        grouped,
        Case { d: 64, lengths: Some(&[300, 77]), ..grouped },
        Case { is_relative: true, lengths: Some(&[0, 200]), ..wide },
        Case { is_relative: true, d: 128, ..wide },
        Case { is_causal: true, first: Some(sevens_and_thirties), ..wide },
        Case { first: Some(sevens_and_thirties), lengths: Some(&[300, 77]), ..grouped },
        Case { d: 40, first: Some(threes), is_causal: true, ..wide },
        Case { queries: 70, keys: 90, heads: 4, kv_heads: 2, d: 160, ..wide },
        Case { queries: 70, keys: 90, d: 256, is_causal: true, ..wide },
    ];
    for case in cases {
        check_gpu(&case.inputs(), 4.0, &|tape, v| case.run(tape, v));
    }
}

/// By matmuls with CUDA, in strips of some queries.
#[test]
fn a_wide_head_needs_no_gradient() {
    for (samples, queries, keys, d) in [(2, 9, 300, 130), (1, 70, 33, 136), (1, 1, 1000, 129)] {
        let case = Case { samples, queries, keys, heads: 1, kv_heads: 1, d, ..CASE };
        check_forward(&case.inputs(), 8.0, &|tape, v| case.run(tape, v), &|v| case.exact(v));
    }
}

#[test]
fn scores_of_a_wide_head_never_exist_whole() {
    let peak = |queries: usize| {
        let device = Device::meta(DeviceKind::Cuda { is_deterministic: false }, usize::MAX / 2);
        let [q, kv] = [queries, 64]
            .map(|tokens| Var::from(device.alloc([1, tokens, 256], Dtype::F32).unwrap()));
        let params = Params::default();
        let tape = Tape::inference(&device, &params, 0);
        tape.attention(&q, &kv, &kv, Attention::full(1, 256)).unwrap();
        device.usage().peak
    };
    // Queries and results alone grow with the number of queries.
    assert_eq!(peak(2048) - peak(1024), 2 * 1024 * 256 * Dtype::F32.bytes());
}
