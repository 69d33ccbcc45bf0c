//! The ops that a device is tested with: what each is given, and how it is called. A new op belongs here too.

use crate::ops::{
    Activation, Adafactor, AdamW, Attention, Conv2d, Conv3d, ConvPadding, ErrorLoss, ErrorWeights,
    FactoredMoments, GradClip, LatentScaling, LatentStd, Linear, Lora, Moments, Moments8bit,
    PatchOrder, Prodigy, ProdigyState, QkNormRope, Rope, RopeAxis, RopePairs, ScheduleFreeState,
    SharedAxis, adafactor, adamw, adamw_8bit, add_noise, count_not_finite, ema, global_norm, lion,
    momentum, prodigy, prodigy_distance, rope_table, row_norms, sample_latents, schedule_free,
    stochastic_round, top_k,
};
use crate::{Dtype, Quantisation, Quantised, RandomSequence, Result, Shape, Tape, Tensor, Var};

/// An op on some inputs.
pub(super) struct SelfTestCase {
    pub name: &'static str,
    pub inputs: Vec<(Shape, InputRole)>,
    pub run: CaseFn,
    /// How much further off it may be than most.
    pub slack: f64,
    /// Whether it allows CUDA to round f32 factors to TF32.
    pub allows_tf32: bool,
}

type CaseFn = Box<dyn Fn(&Tape<'_>, &[Var]) -> Result<Var>>;

/// What an input is for.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum InputRole {
    /// Of the dtype under test, with a gradient.
    Trained,
    /// Of the dtype under test, without.
    Frozen,
    /// Vectors and adapters are f32, with a gradient.
    Vector,
    /// f32 without one.
    FrozenF32,
}

impl InputRole {
    pub fn dtype(self, tested: Dtype) -> Dtype {
        if matches!(self, Self::Trained | Self::Frozen) { tested } else { Dtype::F32 }
    }

    pub fn is_trained(self) -> bool {
        matches!(self, Self::Trained | Self::Vector)
    }
}

impl SelfTestCase {
    /// All inputs trained, in the dtype under test.
    pub fn new(
        name: &'static str,
        shapes: &[Shape],
        run: impl Fn(&Tape<'_>, &[Var]) -> Result<Var> + 'static,
    ) -> Self {
        let inputs = shapes.iter().map(|shape| (*shape, InputRole::Trained)).collect();
        Self { name, inputs, run: Box::new(run), slack: 1.0, allows_tf32: false }
    }

    /// Inputs after the first so many have these roles.
    fn then(mut self, roles: &[(Shape, InputRole)]) -> Self {
        self.inputs.extend(roles);
        self
    }

    /// For ops without backward.
    fn frozen(mut self) -> Self {
        for (_, role) in &mut self.inputs {
            *role = if role.dtype(Dtype::Bf16) == Dtype::F32 {
                InputRole::FrozenF32
            } else {
                InputRole::Frozen
            };
        }
        self
    }

    fn slack(self, slack: f64) -> Self {
        Self { slack, ..self }
    }

    fn with_tf32(self) -> Self {
        Self { allows_tf32: true, ..self }
    }
}

/// All of them.
pub(super) fn cases() -> Vec<SelfTestCase> {
    [elementwise_cases(), matmul_cases(), norms(), tokens(), images(), steps()]
        .into_iter()
        .flatten()
        .collect()
}

fn elementwise_cases() -> Vec<SelfTestCase> {
    let (x, rows): (Shape, Shape) = ([3, 37].into(), [2, 5, 18].into());
    let mut all = vec![
        SelfTestCase::new("add", &[x, x], |tape, v| tape.add(&v[0], &v[1])),
        SelfTestCase::new("scale", &[x], |tape, v| tape.scale(&v[0], -1.5)),
        SelfTestCase::new("convert", &[x], |tape, v| {
            tape.convert(&tape.convert(&v[0], Dtype::F32)?, v[0].dtype())
        }),
        SelfTestCase::new("gated add", &[rows, rows, [2, 36].into()], |tape, v| {
            tape.gated_add(&v[0], v[2].chunk(1), &v[1])
        }),
        SelfTestCase::new("affine", &[x], |tape, v| {
            tape.affine(&v[0], &v[1], Some(&v[2]), Activation::Silu)
        })
        .then(&[([37].into(), InputRole::Vector), ([37].into(), InputRole::Vector)]),
        SelfTestCase::new("gumbel softmax", &[x], |tape, v| {
            tape.gumbel_softmax(v[0].clone(), 0.7, false)
        })
        .slack(4.0),
        SelfTestCase::new("gumbel softmax, mirrored", &[], |tape, v| {
            let [_, mirrored] = tape.gumbel_softmax_pair(v[0].tensor(), 0.7)?;
            Ok(mirrored.into())
        })
        .then(&[(x, InputRole::Frozen)])
        .slack(4.0),
    ];
    let activations = [
        ("gelu by tanh", Activation::GeluTanh),
        ("gelu by erf", Activation::GeluErf),
        ("quick gelu", Activation::QuickGelu),
        ("silu", Activation::Silu),
        ("tanh", Activation::Tanh),
    ];
    for (name, activation) in activations {
        all.push(SelfTestCase::new(name, &[x], move |tape, v| tape.activate(&v[0], activation)));
    }
    all.push(SelfTestCase::new("glu", &[x, x], |tape, v| tape.glu(&v[0], &v[1], Activation::Silu)));
    all
}

fn matmul_cases() -> Vec<SelfTestCase> {
    let (x, weight): (Shape, Shape) = ([70, 128].into(), [90, 128].into());
    let layer = |tape: &Tape<'_>, v: &[Var]| {
        let lora = Some(Lora { down: &v[3], up: &v[4], scale: 0.5, dropout: 0.0 });
        let activation = Activation::GeluTanh;
        tape.linear(&v[0], Linear { bias: Some(&v[2]), activation, lora, ..Linear::new(&v[1]) })
    };
    let vectors = [
        ([90].into(), InputRole::Vector),
        ([4, 128].into(), InputRole::Vector),
        ([90, 4].into(), InputRole::Vector),
    ];
    let mut all = vec![SelfTestCase::new("linear", &[x, weight], layer).then(&vectors).slack(4.0)];
    let formats = [
        ("linear of int8", Quantisation::Int8),
        ("linear of nf4", Quantisation::Nf4),
        ("linear of fp8", Quantisation::Fp8),
    ];
    for (name, how) in formats {
        let run = move |tape: &Tape<'_>, v: &[Var]| {
            tape.linear(&v[0], Linear::new(&Quantised::new(v[1].tensor(), how)?))
        };
        all.push(
            SelfTestCase::new(name, &[x], run).then(&[(weight, InputRole::FrozenF32)]).slack(4.0),
        );
    }
    let dora = |tape: &Tape<'_>, v: &[Var]| {
        let lora = Lora { down: &v[1], up: &v[2], scale: 0.5, dropout: 0.0 };
        let weight = (&v[0]).into();
        tape.dora_scale(weight, &row_norms(weight)?, lora, &v[3])
    };
    let given = [
        (weight, InputRole::FrozenF32),
        ([4, 128].into(), InputRole::FrozenF32),
        ([90, 4].into(), InputRole::FrozenF32),
    ];
    all.push(
        SelfTestCase::new("dora", &[], dora).then(&given).then(&[([90].into(), InputRole::Vector)]),
    );
    all.extend(kronecker_and_khatri_rao());
    all.extend(attentions());
    all.extend(wide_heads());
    all
}

fn kronecker_and_khatri_rao() -> [SelfTestCase; 3] {
    let factors = |a: [usize; 2], b: [usize; 2]| {
        [(a.into(), InputRole::Vector), (b.into(), InputRole::Vector)]
    };
    [
        SelfTestCase::new("mix groups", &[[70, 96].into()], |tape, v| {
            tape.mix_groups(&v[0], &v[1], 16, 0.5)
        })
        .then(&[([5, 6].into(), InputRole::Vector)])
        .slack(4.0),
        SelfTestCase::new("khatri-rao by rows", &[], |tape, v| {
            tape.khatri_rao(&v[0], &v[1], SharedAxis::Rows)
        })
        .then(&factors([90, 4], [90, 3])),
        SelfTestCase::new("khatri-rao by columns", &[], |tape, v| {
            tape.khatri_rao(&v[0], &v[1], SharedAxis::Columns)
        })
        .then(&factors([4, 90], [3, 90])),
    ]
}

fn attentions() -> [SelfTestCase; 2] {
    let (q, kv): (Shape, Shape) = ([2, 37, 4 * 32].into(), [2, 41, 2 * 32].into());
    [
        SelfTestCase::new("attention", &[q, q, q], |tape, v| {
            tape.attention(&v[0], &v[1], &v[2], Attention::full(4, 32))
        })
        .slack(4.0),
        SelfTestCase::new("causal attention of shared heads", &[q, kv, kv], |tape, v| {
            let lengths = tape.device().upload([2], &[41u32, 39])?;
            let (is_causal, key_lengths) = (true, Some(&lengths));
            let how = Attention { n_kv_heads: 2, is_causal, key_lengths, ..Attention::full(4, 32) };
            tape.attention(&v[0], &v[1], &v[2], how)
        })
        .slack(4.0),
    ]
}

/// One head without gradient, as in VAEs; the last has more queries than a strip of them.
fn wide_heads() -> impl Iterator<Item = SelfTestCase> {
    let cases = [
        ("attention of a head of 512", [2, 150, 133, 512], false),
        ("attention of a head of 384", [1, 64, 64, 384], false),
        ("attention of a wide head with tf32", [2, 96, 120, 512], true),
        ("attention of a wide head in strips", [2, 4133, 9, 136], false),
    ];
    cases.into_iter().map(|(name, [samples, queries, keys, d], allows_tf32)| {
        let (q, kv) = ([samples, queries, d].into(), [samples, keys, d].into());
        let run = move |tape: &Tape<'_>, v: &[Var]| {
            let how = Attention { allows_tf32, ..Attention::full(1, d) };
            tape.attention(&v[0], &v[1], &v[2], how)
        };
        let case = SelfTestCase::new(name, &[q, kv, kv], run).frozen().slack(4.0);
        SelfTestCase { allows_tf32, ..case }
    })
}

fn norms() -> Vec<SelfTestCase> {
    let (x, wide): (Shape, Shape) = ([2, 5, 36].into(), [2, 72].into());
    let vector = ([36].into(), InputRole::Vector);
    let heads = |pairs: RopePairs| {
        move |tape: &Tape<'_>, v: &[Var]| {
            let angles = rope_table(&[RopeAxis::new(12, 10_000.0)], &[0.0, 1.0, 2.0, 5.0, 9.0]);
            let table = tape.device().upload([5, 12], &angles)?;
            let (norm, rope) = (Some((&v[1], 1e-6)), Some(Rope { table: &table, pairs }));
            tape.qk_norm_rope(&v[0], QkNormRope { n_heads: 3, norm, rope })
        }
    };
    let weight = [([12].into(), InputRole::Vector)];
    vec![
        SelfTestCase::new("norm with modulation", &[x, wide], |tape, v| {
            tape.norm_modulate(&v[0], v[1].chunk(0), v[1].chunk(1), 1e-6)
        })
        .slack(4.0),
        SelfTestCase::new("layer norm", &[x], |tape, v| {
            tape.layer_norm(&v[0], Some(&v[1]), Some(&v[2]), 1e-5)
        })
        .then(&[vector, vector])
        .slack(4.0),
        SelfTestCase::new("rms norm", &[x], |tape, v| tape.rms_norm(&v[0], Some(&v[1]), 1e-6))
            .then(&[vector])
            .slack(4.0),
        SelfTestCase::new("rotation of neighbours", &[x], heads(RopePairs::Interleaved))
            .then(&weight)
            .slack(4.0),
        SelfTestCase::new("rotation of halves", &[x], heads(RopePairs::HalfSplit))
            .then(&weight)
            .slack(4.0),
        SelfTestCase::new("group norm", &[[2, 6, 5, 7].into()], |tape, v| {
            let [weight, bias] = [v[1].tensor(), v[2].tensor()];
            tape.group_norm(&v[0], 3, weight, bias, 1e-6, Activation::Silu)
        })
        .then(&[([6].into(), InputRole::FrozenF32), ([6].into(), InputRole::FrozenF32)])
        .frozen()
        .slack(4.0),
        SelfTestCase::new("group norm of a large image", &[[2, 8, 128, 132].into()], |tape, v| {
            let [weight, bias] = [v[1].tensor(), v[2].tensor()];
            tape.group_norm(&v[0], 2, weight, bias, 1e-6, Activation::Silu)
        })
        .then(&[([8].into(), InputRole::FrozenF32), ([8].into(), InputRole::FrozenF32)])
        .frozen()
        .slack(4.0),
        SelfTestCase::new(
            "rms norm over channels of a large image",
            &[[2, 37, 40, 64].into()],
            |tape, v| tape.channel_rms_norm(&v[0], v[1].tensor(), Activation::Silu),
        )
        .then(&[([37].into(), InputRole::FrozenF32)])
        .frozen()
        .slack(4.0),
        SelfTestCase::new("rms norm over channels", &[[2, 37, 5, 7].into()], |tape, v| {
            tape.channel_rms_norm(&v[0], v[1].tensor(), Activation::Silu)
        })
        .then(&[([37].into(), InputRole::FrozenF32)])
        .frozen()
        .slack(4.0),
    ]
}

fn tokens() -> Vec<SelfTestCase> {
    let x: Shape = [2, 5, 9].into();
    vec![
        SelfTestCase::new("tokens put together", &[x, x], |tape, v| {
            tape.concat_tokens(&[&v[0], &v[1]])
        }),
        SelfTestCase::new("tokens taken apart", &[x], |tape, v| tape.split_tokens(&v[0], 1..4)),
        SelfTestCase::new("gather", &[x], |tape, v| {
            tape.gather_tokens(&v[0], &tape.device().upload([2, 3], &[4u32, 0, 4, 1, 2, 3])?)
        }),
        SelfTestCase::new("scatter", &[x], |tape, v| {
            let ids = tape.device().upload([2, 5], &[4u32, 0, 4, 1, 2, 3, 3, 3, 0, 6])?;
            tape.scatter_tokens(&v[0], &ids, 7)
        }),
        SelfTestCase::new("largest keys", &[], |tape, v| {
            let ids = top_k(v[0].tensor(), 5)?.to_vec::<u32>();
            let ids: Vec<f32> = ids.into_iter().map(|id| id as f32).collect();
            Ok(tape.device().upload([2, 5], &ids)?.into())
        })
        .then(&[([2, 300].into(), InputRole::FrozenF32)]),
        SelfTestCase::new("embedding", &[[11, 9].into()], |tape, v| {
            tape.embedding(&tape.device().upload([4], &[10u32, 3, 3, 0])?, &v[0])
        }),
        SelfTestCase::new("mean squared error", &[x], |tape, v| {
            let weights = tape.device().upload([2], &[0.5f32, 2.0])?;
            tape.mse(&v[0], v[1].tensor(), Some(&weights), None)
        })
        .then(&[(x, InputRole::FrozenF32)]),
        SelfTestCase::new("huber loss", &[x], |tape, v| {
            let c = tape.device().upload([2], &[0.25f32, 2.0])?;
            let (loss, weights) = (ErrorLoss::Huber(&c), ErrorWeights::default());
            tape.error_loss(&v[0], v[1].tensor(), loss, weights)
        })
        .then(&[(x, InputRole::FrozenF32)]),
        SelfTestCase::new("pseudo-huber loss", &[x], |tape, v| {
            let c = tape.device().upload([2], &[0.25f32, 2.0])?;
            let (loss, weights) = (ErrorLoss::PseudoHuber(&c), ErrorWeights::default());
            tape.error_loss(&v[0], v[1].tensor(), loss, weights)
        })
        .then(&[(x, InputRole::FrozenF32)]),
        SelfTestCase::new("cross entropy", &[[6, 9].into(), [77, 9].into()], |tape, v| {
            let words =
                tape.device().upload([6], &[0u32, 76, 5, 5, crate::ops::IGNORE_INDEX, 40])?;
            tape.cross_entropy(&v[0], &v[1], &words)
        })
        .slack(4.0),
        SelfTestCase::new("weighted cross entropy", &[[6, 9].into(), [77, 9].into()], |tape, v| {
            let words =
                tape.device().upload([6], &[0u32, 76, 5, 5, crate::ops::IGNORE_INDEX, 40])?;
            let weights = [0.5f32, -1.0, 2.0, 0.25, 0.0, -0.75];
            tape.weighted_cross_entropy(&v[0], &v[1], &words, |rows| {
                let loss = rows.iter().zip(weights).filter(|(_, weight)| *weight != 0.0);
                let loss = loss.map(|(row, weight)| f64::from(weight) * row).sum();
                Ok::<_, crate::ComputeError>(crate::ops::RowWeights {
                    loss,
                    weights: weights.into(),
                })
            })
        })
        .slack(4.0),
    ]
}

fn images() -> Vec<SelfTestCase> {
    let image: Shape = [2, 3, 6, 10].into();
    let clip: Shape = [2, 3, 4, 6, 7].into();
    let all = vec![
        SelfTestCase::new("patchify", &[image], |tape, v| {
            let tokens = tape.patchify(&v[0], 2, PatchOrder::ChannelsLast)?;
            tape.unpatchify(&tokens, [6, 10], 2, PatchOrder::ChannelsFirst)
        }),
        SelfTestCase::new("patchify with frames", &[Shape::new(&[2, 3, 2, 6, 10])], |tape, v| {
            let tokens = tape.patchify(&v[0], 2, PatchOrder::ChannelsLast)?;
            tape.unpatchify(&tokens, [2, 6, 10], 2, PatchOrder::ChannelsFirst)
        }),
        SelfTestCase::new("upsample", &[image], |tape, v| tape.upsample(&v[0], 2)),
        SelfTestCase::new("upsample of clips", &[clip], |tape, v| tape.upsample_clip(&v[0], 2, 2)),
        SelfTestCase::new("mean pool", &[image], |tape, v| tape.avg_pool(&v[0], 2)),
        SelfTestCase::new("convolution", &[image], |tape, v| {
            let (weight, bias) = (v[1].tensor(), Some(v[2].tensor()));
            let activation = Activation::Silu;
            tape.conv2d(&v[0], Conv2d { bias, padding: [1; 4], activation, ..Conv2d::new(weight) })
        })
        .then(&[([5, 3, 3, 3].into(), InputRole::FrozenF32), ([5].into(), InputRole::FrozenF32)])
        .slack(4.0),
        SelfTestCase::new("convolution with tf32", &[[2, 16, 24, 40].into()], |tape, v| {
            let (weight, bias) = (v[1].tensor(), Some(v[2].tensor()));
            let layer = Conv2d { bias, padding: [1; 4], ..Conv2d::new(weight) };
            tape.conv2d(&v[0], Conv2d { allows_tf32: true, ..layer })
        })
        .then(&[([64, 16, 3, 3].into(), InputRole::FrozenF32), ([64].into(), InputRole::FrozenF32)])
        .slack(4.0)
        .with_tf32(),
        SelfTestCase::new("convolution of clips", &[clip], |tape, v| {
            let layer = Conv3d {
                bias: Some(v[2].tensor()),
                stride: [2, 1, 2],
                padding: [[2, 0], [1, 1], [1, 1]],
                padding_mode: ConvPadding::Replicate,
                ..Conv3d::new(v[1].tensor())
            };
            tape.conv3d(&v[0], layer)
        })
        .then(&[([5, 3, 3, 3, 3].into(), InputRole::FrozenF32), ([5].into(), InputRole::FrozenF32)])
        .slack(4.0),
        SelfTestCase::new("noise", &[image], noise)
            .then(&[
                (image, InputRole::FrozenF32),
                (image, InputRole::FrozenF32),
                ([3].into(), InputRole::FrozenF32),
            ])
            .slack(4.0),
    ];
    all.into_iter().map(SelfTestCase::frozen).collect()
}

/// The first input's dtype is that of the result.
fn noise(tape: &Tape<'_>, v: &[Var]) -> Result<Var> {
    let streams = [RandomSequence::new(5, 1), RandomSequence::new(5, 2)];
    let spread = LatentStd { std: v[2].tensor(), sequences: &streams };
    let channels = LatentScaling { shift: v[3].tensor(), scale: v[3].tensor() };
    let latents = sample_latents(v[1].tensor().clone(), Some(spread), channels)?;
    let sigmas = tape.device().upload([2], &[0.25f32, 0.8])?;
    let both = add_noise(latents, &sigmas, &streams, v[0].dtype())?;
    tape.add(&both.noisy.into(), &tape.convert(&both.velocity.into(), v[0].dtype())?)
}

fn steps() -> Vec<SelfTestCase> {
    let given = |name, run: fn(&Tape<'_>, &[Var]) -> Result<Var>| {
        SelfTestCase::new(name, &[], run)
            .then(&[([600].into(), InputRole::FrozenF32), ([600].into(), InputRole::FrozenF32)])
    };
    vec![
        given("adamw", |_, v| {
            let (mut params, mut state) = param_and_state(v, Moments::new)?;
            adamw(&mut params, &[Some(v[1].tensor())], &mut state, AdamW::default(), None)?;
            Ok(params.remove(0).into())
        }),
        given("adamw of 8 bits, clipped", |tape, v| {
            let (mut params, mut state) = param_and_state(v, Moments8bit::new)?;
            let gradients = [Some(v[1].tensor())];
            let clip = GradClip { norm: global_norm(&gradients, tape.device())?, max_norm: 1.0 };
            for step in 1..=3 {
                let step = AdamW { step, ..AdamW::default() };
                adamw_8bit(&mut params, &gradients, &mut state, step, Some(&clip))?;
            }
            Ok(params.remove(0).into())
        }),
        given("lion", |_, v| {
            let (mut params, mut state) = param_and_state(v, momentum)?;
            for _ in 0..3 {
                lion(&mut params, &[Some(v[1].tensor())], &mut state, AdamW::default(), None)?;
            }
            Ok(params.remove(0).into())
        }),
        given("schedule-free adamw", |_, v| {
            let (mut params, mut state) = param_and_state(v, ScheduleFreeState::new)?;
            for (step, weight) in [(1, 1.0), (2, 0.5), (3, 1.0 / 3.0)] {
                let step = AdamW { step, ..AdamW::default() };
                let gradients = [Some(v[1].tensor())];
                schedule_free(&mut params, &gradients, &mut state, step, weight, None)?;
            }
            Ok(params.remove(0).into())
        }),
        given("adafactor", |_, v| {
            let mut params = [v[0].tensor().clone().into_unique()?.reshape([20, 30])];
            let mut state = [FactoredMoments::new(&params[0])?];
            let gradient = v[1].tensor().reshape([20, 30]);
            let how = Adafactor { adamw: AdamW::default(), scale_parameter: true };
            adafactor(&mut params, &[Some(&gradient)], &mut state, how, None)?;
            let [param] = params;
            Ok(param.into())
        }),
        given("prodigy", |tape, v| {
            let (mut params, mut state) = param_and_state(v, ProdigyState::new)?;
            let mut distance = prodigy_distance(tape.device(), 1e-2)?;
            for step in 1..=3 {
                let how = Prodigy {
                    adamw: AdamW { learning_rate: 1.0, step, ..AdamW::default() },
                    d0: 1e-2,
                    d_coef: 1.0,
                    use_bias_correction: true,
                    safeguard_warmup: false,
                };
                let gradients = [Some(v[1].tensor())];
                prodigy(&mut params, &gradients, &mut state, &mut distance, how, None)?;
            }
            Ok(params.remove(0).into())
        }),
        given("moving average", |_, v| {
            let (mut params, _) = param_and_state(v, |_| Ok(()))?;
            ema(&mut params[0], v[1].tensor(), 0.9)?;
            Ok(params.remove(0).into())
        }),
        given("stochastic rounding", |tape, v| {
            let mut rounded = tape.device().zeros(v[0].shape(), Dtype::Bf16)?;
            stochastic_round(v[0].tensor(), &mut rounded, RandomSequence::new(5, 6))?;
            Ok(rounded.into())
        }),
        given("finite check", |tape, v| {
            let count = count_not_finite(&[v[0].tensor(), v[1].tensor()])?.to_vec::<u32>()[0];
            Ok(tape.device().upload([1], &[1.0 + count as f32])?.into())
        }),
        given("random numbers", |tape, _| {
            Ok(tape.device().normal([301], Dtype::F32, 2.0, RandomSequence::new(3, 4))?.into())
        })
        .slack(4.0),
    ]
}

/// A parameter of its own, and what its optimizer remembers.
fn param_and_state<T>(
    v: &[Var],
    state: impl Fn(&Tensor) -> Result<T>,
) -> Result<(Vec<Tensor>, Vec<T>)> {
    let param = v[0].tensor().clone().into_unique()?;
    let state = state(&param)?;
    Ok((vec![param], vec![state]))
}
