//! What comes back, and how far off it is.

use super::cpu::nearest_e4m3;
use super::*;
use crate::{Device, DeviceKind, RandomSequence};

fn quantised(numbers: &[f32], width: usize, how: Quantisation) -> Quantised {
    let device = Device::cpu(2, 1 << 24).unwrap();
    let matrix = device.upload([numbers.len() / width, width], numbers).unwrap();
    Quantised::new(&matrix, how).unwrap()
}

#[test]
fn values_come_back_within_half_a_step() {
    let device = Device::cpu(2, 1 << 24).unwrap();
    let matrix = device.normal([37, 192], Dtype::F32, 0.02, RandomSequence::new(1, 1)).unwrap();
    let exact = matrix.to_f32_vec();
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let back = Quantised::new(&matrix, how).unwrap().to_f32_vec().unwrap();
        for (index, (exact, back)) in exact.iter().zip(&back).enumerate() {
            let row = &matrix.to_f32_vec()[index / 192 * 192..][..192];
            let most = row.iter().fold(0.0, |most: f32, x| most.max(x.abs()));
            let step = match how {
                Quantisation::Int8 => most / 127.0,
                Quantisation::Fp8 => (exact.abs() / 8.0).max(most / 448.0 / 512.0),
                // The widest step, of the largest scale with its own error.
                Quantisation::Nf4 => most * 0.31,
            };
            assert!((exact - back).abs() <= 0.501 * step, "{how}: {exact} {back}");
        }
    }
}

#[test]
fn sizes_are_as_small_as_they_should_be() {
    let numbers = vec![1.0; 256 * 1024];
    let bytes = |how| quantised(&numbers, 1024, how).bytes();
    assert_eq!(bytes(Quantisation::Int8), 256 * 1024 + 256 * 4);
    assert_eq!(bytes(Quantisation::Fp8), 256 * 1024 + 256 * 4);
    assert_eq!(bytes(Quantisation::Nf4), 128 * 1024 + 4096 + 16 * 4 + 4);
}

#[test]
fn zeros_and_the_largest_are_exact() {
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let mut numbers = vec![0.0; 128];
        assert_eq!(quantised(&numbers, 64, how).to_f32_vec().unwrap(), numbers);
        numbers[70] = -3.0;
        let back = quantised(&numbers, 64, how).to_f32_vec().unwrap();
        assert!((back[70] + 3.0).abs() < 1e-6 && back[..70].iter().all(|x| *x == 0.0), "{how}");
    }
}

#[test]
fn e4m3_rounds_to_nearest_and_even() {
    for code in 0..=255u8 {
        let number = e4m3(code);
        assert_eq!(number.is_nan(), code & 0x7f == 0x7f);
        if !number.is_nan() {
            assert_eq!(nearest_e4m3(number), code, "{number}");
        }
    }
    assert_eq!((e4m3(0x7e), e4m3(0x08), e4m3(0x01)), (448.0, 0.015_625, 0.001_953_125));
    let middle = |low: u8| f32::midpoint(e4m3(low), e4m3(low + 1));
    for low in 0..0x7e {
        let even = low + low % 2;
        assert_eq!(nearest_e4m3(middle(low)), even, "{low}");
        assert_eq!(nearest_e4m3(middle(low) * 1.001), low + 1);
    }
    assert_eq!((nearest_e4m3(1e9), nearest_e4m3(f32::NEG_INFINITY)), (0x7e, 0xfe));
}

#[test]
fn the_meta_device_takes_the_same_memory() {
    let real = Device::cpu(2, 1 << 24).unwrap();
    let meta = Device::meta(DeviceKind::cpu(2), 1 << 24);
    for how in [Quantisation::Int8, Quantisation::Nf4, Quantisation::Fp8] {
        let usage = |device: &Device| {
            let matrix =
                device.normal([37, 192], Dtype::Bf16, 0.02, RandomSequence::new(1, 1)).unwrap();
            let made = Quantised::new(&matrix, how).unwrap();
            drop(matrix);
            (device.usage(), made.bytes())
        };
        assert_eq!(usage(&real), usage(&meta), "{how}");
    }
}

#[test]
fn a_width_that_blocks_do_not_fill_is_refused() {
    let device = Device::cpu(1, 1 << 20).unwrap();
    let matrix = device.zeros([4, 96], Dtype::F32).unwrap();
    let error = Quantised::new(&matrix, Quantisation::Nf4).unwrap_err().to_string();
    assert_eq!(error, "quantise: width of the matrix 96 is not a multiple of 64");
    let ids = device.zeros([4, 64], Dtype::U32).unwrap();
    let error = Quantised::new(&ids, Quantisation::Int8).unwrap_err().to_string();
    assert_eq!(error, "quantise: matrix is u32, expected f32, bf16 or f16");
}
