//! Convolutions against their formula. In tests a strip is small, so that images of a few pixels
//! are cut too.

use super::{Conv2d, STRIP_BYTES};
use crate::ops::Activation;
use crate::ops::activation::tests::{ALL, exact};
use crate::testing::{Dual, Input, check_forward_within, compare, device, for_random_sizes};
use crate::{Device, Dtype, Params, Tape, Tensor, Var};

struct Case {
    /// Samples, channels, height, width.
    x: [usize; 4],
    /// Outputs, kernel height, kernel width.
    kernel: [usize; 3],
    stride: usize,
    padding: [usize; 4],
    activation: Activation,
}

impl Case {
    /// Nothing special about it.
    fn new(x: [usize; 4], kernel: [usize; 3]) -> Self {
        Self { x, kernel, stride: 1, padding: [0; 4], activation: Activation::None }
    }

    fn check(&self) {
        let [outputs, kernel_height, kernel_width] = self.kernel;
        let weight = [outputs, self.x[1], kernel_height, kernel_width];
        let inputs = [
            Input::normal(self.x, 1),
            Input::normal(weight, 2).scaled(0.5),
            Input::normal([outputs], 3).f32(),
        ];
        // Winograd loses a few bits.
        let least = if self.kernel[1..] == [3, 3] && self.stride == 1 { 5e-6 } else { 1e-6 };
        check_forward_within(
            &inputs,
            4.0,
            least,
            &|tape, v| {
                let layer = Conv2d {
                    bias: Some(v[2].tensor()),
                    stride: self.stride,
                    padding: self.padding,
                    activation: self.activation,
                    ..Conv2d::new(v[1].tensor())
                };
                tape.conv2d(&v[0], layer)
            },
            &|v| self.reference(v),
        );
    }

    fn reference(&self, v: &[Vec<Dual>]) -> Vec<Dual> {
        let ([samples, _, height, width], [outputs, ..]) = (self.x, self.kernel);
        let [top, bottom, left, right] = self.padding;
        let down = (height + top + bottom - self.kernel[1]) / self.stride + 1;
        let across = (width + left + right - self.kernel[2]) / self.stride + 1;
        let mut y = Vec::new();
        for (sample, output) in (0..samples).flat_map(|s| (0..outputs).map(move |o| (s, o))) {
            for (row, column) in (0..down).flat_map(|i| (0..across).map(move |j| (i, j))) {
                let corner = [row * self.stride, column * self.stride];
                let sum = self.window(v, sample, output, corner) + v[2][output].value;
                y.push(exact(self.activation, Dual::from(sum)));
            }
        }
        y
    }

    fn window(&self, v: &[Vec<Dual>], sample: usize, output: usize, corner: [usize; 2]) -> f64 {
        let ([_, channels, height, width], [_, kernel_height, kernel_width]) =
            (self.x, self.kernel);
        let mut sum = 0.0;
        for channel in 0..channels {
            for row in 0..kernel_height {
                for column in 0..kernel_width {
                    let y = (corner[0] + row).wrapping_sub(self.padding[0]);
                    let x = (corner[1] + column).wrapping_sub(self.padding[2]);
                    if y < height && x < width {
                        let at = ((sample * channels + channel) * height + y) * width + x;
                        let tap = (output * channels + channel) * kernel_height + row;
                        sum += v[0][at].value * v[1][tap * kernel_width + column].value;
                    }
                }
            }
        }
        sum
    }
}

#[test]
fn kernels_strides_and_paddings() {
    for (kernel, stride, padding) in [
        ([3, 3, 3], 1, [1; 4]),
        ([2, 3, 3], 2, [0, 1, 0, 1]),
        ([2, 3, 3], 2, [1, 0, 1, 0]),
        ([4, 2, 5], 1, [0, 0, 3, 0]),
        ([1, 4, 1], 3, [2, 3, 0, 0]),
        ([3, 1, 1], 1, [0, 1, 2, 0]),
        ([3, 1, 1], 2, [0; 4]),
        // Windows that see nothing but padding.
        ([2, 2, 2], 1, [3, 4, 5, 4]),
    ] {
        Case { stride, padding, ..Case::new([2, 3, 6, 7], kernel) }.check();
    }
}

#[test]
fn random_sizes() {
    for_random_sizes(
        12,
        [2, 4, 6, 6, 5, 3, 3, 3],
        |[samples, channels, h, w, out, kh, kw, stride]| {
            let padding = [kh, kw - 1, stride - 1, kw];
            Case { stride, padding, ..Case::new([samples, channels, h, w], [out, kh, kw]) }.check();
        },
    );
}

#[test]
fn many_strips_that_end_anywhere() {
    // 20 windows of 50 numbers and more in a strip of rows that are 23 pixels long.
    let padding = [1; 4];
    Case { padding, ..Case::new([1, 6, 11, 23], [5, 3, 3]) }.check();
    // A strip that has room for less than one window has one all the same.
    Case::new([1, STRIP_BYTES / 2 + 1, 1, 2], [2, 1, 2]).check();
}

#[test]
fn one_pixel_needs_no_columns() {
    // All channels at once; then in strips; then more pixels than that is good for.
    Case::new([2, 5, 4, 3], [6, 1, 1]).check();
    Case::new([2, 3, 4, 4], [70, 1, 1]).check();
    Case::new([1, 3, 40, 41], [2, 1, 1]).check();
}

#[test]
fn activations_follow_the_bias() {
    for activation in ALL {
        Case { activation, ..Case::new([1, 2, 4, 5], [3, 2, 2]) }.check();
        Case { activation, ..Case::new([1, 2, 2, 5], [3, 1, 1]) }.check();
    }
}

#[test]
fn without_a_bias_and_with_weights_of_another_format() {
    let device = device();
    let weight = device.upload([1, 1, 1, 2], &[half::bf16::ONE, half::bf16::NEG_ONE]).unwrap();
    let x = device.upload([1, 1, 2, 3], &[1.0f32, 2.0, 4.0, 0.0, 7.0, 5.0]).unwrap();
    assert_eq!(convolve(&device, x, Conv2d::new(&weight)), [-1.0, -2.0, -7.0, 2.0]);
}

fn convolve(device: &Device, x: Tensor, layer: Conv2d<'_>) -> Vec<f32> {
    let params = Params::default();
    let y = Tape::inference(device, &params, 0).conv2d(&Var::from(x), layer);
    y.unwrap().tensor().to_f32_vec()
}

#[test]
fn the_same_as_torch() {
    // import torch, torch.nn.functional as F
    // x = (torch.arange(40.) * 0.37).sin().reshape(1, 2, 4, 5)
    // weight = (torch.arange(36.) * 0.71).cos().reshape(2, 2, 3, 3)
    // y = F.conv2d(F.pad(x, (0, 1, 0, 1)), weight, torch.tensor([0.5, -0.25]), stride=2)
    // print(y.flatten().tolist())
    let torch = [
        -0.038_862_228,
        4.748_790_3,
        -3.407_973_5,
        -5.597_401_1,
        -2.423_863_2,
        2.520_704_3,
        -3.309_050_6,
        -5.876_521_6,
    ];
    let device = device();
    let numbers = |count: u16, step: f32, of: fn(f32) -> f32| -> Vec<f32> {
        (0..count).map(|index| of(f32::from(index) * step)).collect()
    };
    let x = device.upload([1, 2, 4, 5], &numbers(40, 0.37, f32::sin)).unwrap();
    let weight = device.upload([2, 2, 3, 3], &numbers(36, 0.71, f32::cos)).unwrap();
    let bias = device.upload([2], &[0.5f32, -0.25]).unwrap();
    let (stride, padding) = (2, [0, 1, 0, 1]);
    let layer = Conv2d { bias: Some(&bias), stride, padding, ..Conv2d::new(&weight) };
    compare("conv2d of torch", &convolve(&device, x, layer), &torch, 1e-6);
}

#[test]
fn nan_reaches_its_windows_only() {
    let device = device();
    let mut numbers = [1.0f32; 12];
    numbers[0] = f32::NAN;
    let x = device.upload([1, 1, 3, 4], &numbers).unwrap();
    let weight = device.upload([1, 1, 2, 2], &[0.0f32; 4]).unwrap();
    let y = convolve(&device, x, Conv2d::new(&weight));
    assert!(y[0].is_nan() && y[1..].iter().all(|y| *y == 0.0), "{y:?}");
}

#[test]
fn nothing_gives_nothing_or_the_bias() {
    let device = device();
    let zeros = |shape: [usize; 4]| device.zeros(shape, Dtype::F32).unwrap();
    let bias = device.upload([2], &[1.0f32, 2.0]).unwrap();
    let weight = zeros([2, 3, 1, 1]);
    let layer = Conv2d { bias: Some(&bias), ..Conv2d::new(&weight) };
    assert!(convolve(&device, zeros([0, 3, 4, 4]), layer).is_empty());
    let weight = zeros([2, 0, 2, 2]);
    let layer = Conv2d { bias: Some(&bias), ..Conv2d::new(&weight) };
    assert_eq!(convolve(&device, zeros([1, 0, 2, 3]), layer), [1.0, 1.0, 2.0, 2.0]);
    let layer = Conv2d { padding: [1; 4], ..layer };
    assert_eq!(convolve(&device, zeros([1, 0, 0, 1]), layer), [1.0, 1.0, 2.0, 2.0]);
}

#[test]
fn what_does_not_fit_is_said() {
    let (device, params) = (device(), Params::default());
    let tape = Tape::training(&device, &params, 0);
    let zeros = |shape: &[usize]| device.zeros(crate::Shape::new(shape), Dtype::F32).unwrap();
    let message = |x: &Var, layer| tape.conv2d(x, layer).err().unwrap().to_string();
    let (x, weight) = (Var::from(zeros(&[1, 3, 4, 5])), zeros(&[2, 4, 3, 3]));
    assert_eq!(
        message(&x, Conv2d::new(&weight)),
        "conv2d: weight has shape [2, 4, 3, 3], expected [2, 3, 3, 3]"
    );
    let (weight, bias) = (zeros(&[2, 3, 5, 3]), zeros(&[3]));
    let layer = Conv2d::new(&weight);
    assert_eq!(
        message(&x, Conv2d { bias: Some(&bias), ..layer }),
        "conv2d: bias has shape [3], expected [2]"
    );
    assert_eq!(
        message(&x, layer),
        "conv2d: kernel height is 5, expected 1 to the padded image's 4"
    );
    assert_eq!(
        message(&x, Conv2d { stride: 0, ..layer }),
        "conv2d: stride is 0, expected 1 or more"
    );
    let trained = tape.leaf(x.into_tensor());
    assert_eq!(
        message(&trained, Conv2d { padding: [1; 4], ..layer }),
        "conv2d: has no backward, but its input requires a gradient"
    );
}

#[test]
fn three_by_three_by_winograd() {
    let cases = [
        ([2, 3, 4, 4], 3, [1; 4]),
        ([1, 5, 7, 9], 4, [1; 4]),
        ([1, 4, 6, 5], 7, [0; 4]),
        ([1, 3, 5, 8], 3, [0, 1, 0, 1]),
        ([1, 3, 3, 3], 3, [2, 0, 3, 1]),
        ([1, 3, 1, 1], 3, [1; 4]),
        // Several strips of squares.
        ([1, 6, 40, 31], 5, [1; 4]),
    ];
    for (x, outputs, padding) in cases {
        let activation = Activation::Silu;
        Case { padding, activation, ..Case::new(x, [outputs, 3, 3]) }.check();
    }
}

#[test]
fn nan_stays_visible_with_winograd() {
    let device = device();
    let mut numbers = vec![1.0f32; 4 * 6 * 6];
    numbers[14] = f32::NAN;
    let x = Var::from(device.upload([1, 4, 6, 6], &numbers).unwrap());
    let weight = device.upload([3, 4, 3, 3], &[1.0f32; 3 * 4 * 9]).unwrap();
    let params = Params::default();
    let tape = Tape::inference(&device, &params, 0);
    let y = tape.conv2d(&x, Conv2d { padding: [1; 4], ..Conv2d::new(&weight) }).unwrap();
    let y = y.tensor().to_f32_vec();
    for row in 1..4 {
        assert!(y[6 * row + 1..6 * row + 4].iter().all(|number| number.is_nan()), "{y:?}");
    }
    assert!(y[30..36].iter().all(|number| number.is_finite()), "{y:?}");
}
