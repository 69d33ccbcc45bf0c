//! Convolutions of clips against their formula.

use super::{Conv3d, ConvPadding};
use crate::ops::Activation;
use crate::ops::activation::tests::exact;
use crate::testing::{Dual, Input, check_forward_within, compare, device, for_random_sizes};
use crate::{Device, Dtype, Params, Shape, Tape, Tensor, Var};

/// Causal in time, and as large as before in space.
const CAUSAL: [[usize; 2]; 3] = [[2, 0], [1, 1], [1, 1]];

struct ClipCase {
    /// Samples, channels, frames, height, width.
    x: [usize; 5],
    /// Outputs, kernel frames, kernel height, kernel width.
    kernel: [usize; 4],
    stride: [usize; 3],
    padding: [[usize; 2]; 3],
    mode: ConvPadding,
    activation: Activation,
}

impl ClipCase {
    /// As causal video autoencoders have them.
    fn causal(x: [usize; 5], outputs: usize) -> Self {
        let (stride, mode) = ([1; 3], ConvPadding::Replicate);
        let activation = Activation::None;
        Self { x, kernel: [outputs, 3, 3, 3], stride, padding: CAUSAL, mode, activation }
    }

    fn check(&self) {
        let [outputs, frames, height, width] = self.kernel;
        let inputs = [
            Input::normal(self.x, 1),
            Input::normal([outputs, self.x[1], frames, height, width], 2).scaled(0.4),
            Input::normal([outputs], 3).f32(),
        ];
        // Winograd loses a few bits.
        let is_winograd = [height, width] == [3, 3] && self.stride[1..] == [1, 1];
        let least = if is_winograd { 5e-6 } else { 1e-6 };
        check_forward_within(
            &inputs,
            4.0,
            least,
            &|tape, v| {
                let layer = Conv3d {
                    bias: Some(v[2].tensor()),
                    stride: self.stride,
                    padding: self.padding,
                    padding_mode: self.mode,
                    activation: self.activation,
                    ..Conv3d::new(v[1].tensor())
                };
                tape.conv3d(&v[0], layer)
            },
            &|v| self.reference(v),
        );
    }

    fn reference(&self, v: &[Vec<Dual>]) -> Vec<Dual> {
        let ([samples, _, clip @ ..], [outputs, kernel @ ..]) = (self.x, self.kernel);
        let n: [usize; 3] = std::array::from_fn(|axis| {
            let size = clip[axis] + self.padding[axis].iter().sum::<usize>();
            (size - kernel[axis]) / self.stride[axis] + 1
        });
        let mut y = Vec::new();
        for (sample, output) in (0..samples).flat_map(|s| (0..outputs).map(move |o| (s, o))) {
            for at in grid(n) {
                let corner = std::array::from_fn(|axis| at[axis] * self.stride[axis]);
                let sum = self.window(v, sample, output, corner) + v[2][output].value;
                y.push(exact(self.activation, Dual::from(sum)));
            }
        }
        y
    }

    fn window(&self, v: &[Vec<Dual>], sample: usize, output: usize, corner: [usize; 3]) -> f64 {
        let ([_, channels, clip @ ..], [_, kernel @ ..]) = (self.x, self.kernel);
        let mut sum = 0.0;
        for channel in 0..channels {
            for (tap, offset) in grid(kernel).enumerate() {
                let at: [usize; 3] = std::array::from_fn(|axis| {
                    let at = (corner[axis] + offset[axis]).cast_signed();
                    let at = at - self.padding[axis][0].cast_signed();
                    match self.mode {
                        ConvPadding::Zeros => at as usize,
                        ConvPadding::Replicate => {
                            at.clamp(0, clip[axis].cast_signed() - 1) as usize
                        }
                    }
                });
                if (0..3).all(|axis| at[axis] < clip[axis]) {
                    let [frames, height, width] = clip;
                    let plane = (sample * channels + channel) * frames + at[0];
                    let x = v[0][(plane * height + at[1]) * width + at[2]].value;
                    let taps = kernel[0] * kernel[1] * kernel[2];
                    sum += x * v[1][(output * channels + channel) * taps + tap].value;
                }
            }
        }
        sum
    }
}

fn grid([frames, rows, columns]: [usize; 3]) -> impl Iterator<Item = [usize; 3]> {
    (0..frames * rows * columns)
        .map(move |at| [at / columns / rows, at / columns % rows, at % columns])
}

#[test]
fn causal_and_strided_with_repeated_edges() {
    for stride in [[1, 1, 1], [1, 2, 2], [2, 2, 2], [2, 1, 3]] {
        ClipCase { stride, ..ClipCase::causal([2, 2, 4, 5, 6], 3) }.check();
    }
    // Fewer frames than the kernel has, and one pixel.
    ClipCase::causal([1, 3, 1, 4, 7], 4).check();
    ClipCase::causal([1, 3, 2, 1, 1], 3).check();
}

#[test]
fn kernels_and_paddings_of_both_modes() {
    let cases = [
        ([2, 1, 1, 1], [1; 3], [[0; 2]; 3]),
        ([3, 2, 1, 3], [1, 2, 1], [[1, 0], [0, 0], [2, 1]]),
        ([2, 3, 2, 2], [2, 1, 1], [[0, 3], [3, 0], [0, 1]]),
        ([1, 1, 3, 3], [2, 1, 1], [[0, 0], [1, 1], [3, 2]]),
        // Windows that see nothing but padding.
        ([2, 2, 1, 2], [1, 1, 1], [[3, 4], [2, 2], [5, 4]]),
    ];
    for mode in [ConvPadding::Zeros, ConvPadding::Replicate] {
        for (kernel, stride, padding) in cases {
            let activation = Activation::Silu;
            ClipCase { x: [2, 3, 3, 5, 6], kernel, stride, padding, mode, activation }.check();
        }
    }
}

#[test]
fn random_sizes_of_clips() {
    for_random_sizes(
        8,
        [2, 4, 4, 6, 6, 5, 3, 3],
        |[samples, channels, f, h, w, out, kt, stride]| {
            let (kernel, padding) = ([out, kt, 3, 3], [[kt - 1, 0], [1, 1], [1, 2]]);
            let (x, mode) = ([samples, channels, f, h, w], ConvPadding::Replicate);
            let activation = Activation::None;
            ClipCase { x, kernel, stride: [stride, 1, 1], padding, mode, activation }.check();
        },
    );
}

#[test]
fn strips_end_anywhere_in_a_clip() {
    // Strips of columns, of channels for a kernel of one value, and of squares for Winograd.
    ClipCase { stride: [1, 2, 1], ..ClipCase::causal([1, 5, 3, 11, 13], 4) }.check();
    ClipCase {
        kernel: [70, 1, 1, 1],
        padding: [[0; 2]; 3],
        ..ClipCase::causal([2, 3, 2, 4, 3], 0)
    }
    .check();
    ClipCase::causal([2, 4, 3, 21, 18], 5).check();
}

fn convolve(device: &Device, x: Tensor, layer: Conv3d<'_>) -> Vec<f32> {
    let params = Params::default();
    let y = Tape::inference(device, &params, 0).conv3d(&Var::from(x), layer);
    y.unwrap().tensor().to_f32_vec()
}

#[test]
fn the_same_as_torch_with_repeated_edges() {
    // import torch, torch.nn.functional as F
    // x = (torch.arange(48.) * 0.37).sin().reshape(1, 2, 3, 4, 2)
    // weight = (torch.arange(108.) * 0.71).cos().reshape(2, 2, 3, 3, 3)
    // x = F.pad(x, (1, 1, 1, 1, 2, 0), mode="replicate")
    // y = F.conv3d(x, weight, torch.tensor([0.5, -0.25]), stride=(2, 2, 2))
    // print(y.flatten().tolist())
    let torch = [
        -1.190_214_9,
        -0.269_846_98,
        0.062_429_84,
        0.061_500_1,
        -1.380_126_5,
        -3.973_271_1,
        -0.451_058,
        -1.509_907_7,
    ];
    let device = device();
    let numbers = |count: u16, step: f32, of: fn(f32) -> f32| -> Vec<f32> {
        (0..count).map(|index| of(f32::from(index) * step)).collect()
    };
    let x = device.upload([1, 2, 3, 4, 2], &numbers(48, 0.37, f32::sin)).unwrap();
    let weight = device.upload([2, 2, 3, 3, 3], &numbers(108, 0.71, f32::cos)).unwrap();
    let bias = device.upload([2], &[0.5f32, -0.25]).unwrap();
    let layer = Conv3d {
        bias: Some(&bias),
        stride: [2; 3],
        padding: CAUSAL,
        padding_mode: ConvPadding::Replicate,
        ..Conv3d::new(&weight)
    };
    compare("conv3d of torch", &convolve(&device, x, layer), &torch, 2e-6);
}

#[test]
fn later_frames_reach_no_earlier_ones() {
    let device = device();
    let mut numbers = vec![1.0f32; 4 * 5 * 36];
    // The fourth frame of the first channel.
    numbers[3 * 36 + 14] = f32::NAN;
    let x = device.upload([1, 4, 5, 6, 6], &numbers).unwrap();
    let weight = device.upload([3, 4, 3, 3, 3], &[1.0f32; 3 * 4 * 27]).unwrap();
    let (padding, padding_mode) = (CAUSAL, ConvPadding::Replicate);
    let y = convolve(&device, x, Conv3d { padding, padding_mode, ..Conv3d::new(&weight) });
    for plane in y.chunks(5 * 36) {
        assert!(plane[..3 * 36].iter().all(|number| *number == 108.0), "{plane:?}");
        assert!(plane[3 * 36 + 14].is_nan() && plane[4 * 36 + 14].is_nan(), "{plane:?}");
    }
}

#[test]
fn clips_of_nothing_give_nothing_or_the_bias() {
    let device = device();
    let zeros = |shape: [usize; 5]| device.zeros(shape, Dtype::F32).unwrap();
    let bias = device.upload([2], &[1.0f32, 2.0]).unwrap();
    let weight = zeros([2, 1, 1, 1, 1]);
    let layer = Conv3d { bias: Some(&bias), ..Conv3d::new(&weight) };
    assert!(convolve(&device, zeros([0, 1, 2, 2, 2]), layer).is_empty());
    let (padding, padding_mode) = ([[1, 0], [0; 2], [0; 2]], ConvPadding::Replicate);
    let layer = Conv3d { padding, padding_mode, ..layer };
    assert_eq!(convolve(&device, zeros([1, 1, 0, 1, 2]), layer), [1.0, 1.0, 2.0, 2.0]);
}

#[test]
fn what_does_not_fit_a_clip_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let zeros = |shape: &[usize]| device.zeros(Shape::new(shape), Dtype::F32).unwrap();
    let message = |x: &Var, layer| tape.conv3d(x, layer).err().unwrap().to_string();
    let (image, weight) = (Var::from(zeros(&[1, 3, 4, 5])), zeros(&[2, 3, 3, 3, 3]));
    let layer = Conv3d::new(&weight);
    assert_eq!(
        message(&image, layer),
        "conv3d: x of shape [1, 3, 4, 5] has 4 dimensions, expected 5"
    );
    let x = Var::from(zeros(&[1, 4, 2, 4, 5]));
    assert_eq!(
        message(&x, layer),
        "conv3d: weight has shape [2, 3, 3, 3, 3], expected [2, 4, 3, 3, 3]"
    );
    let x = Var::from(zeros(&[1, 3, 2, 4, 5]));
    assert_eq!(
        message(&x, layer),
        "conv3d: kernel frames is 3, expected 1 to the padded image's 2"
    );
    assert_eq!(
        message(&x, Conv3d { stride: [0, 1, 1], padding: CAUSAL, ..layer }),
        "conv3d: stride is 0, expected 1 or more"
    );
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, Conv3d { padding: CAUSAL, ..layer }),
        "conv3d: has no backward, but its input requires a gradient"
    );
}
