//! Values from one format to another, a block at a time, through f32.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};

use crate::dtype::FileDtype;

/// Values that fit the first-level cache in both formats and as f32 between them.
const CHUNK: usize = 1024;

/// Whether values of one format can be turned into another. Equal formats always can.
pub fn can_convert(from: FileDtype, to: FileDtype) -> bool {
    from == to || can_compute(from, to)
}

/// Whether values of one format can be read as f32, and written in another.
pub fn can_compute(from: FileDtype, to: FileDtype) -> bool {
    matches!(
        from,
        FileDtype::F64
            | FileDtype::F32
            | FileDtype::F16
            | FileDtype::Bf16
            | FileDtype::F8E4M3
            | FileDtype::F8E5M2
    ) && matches!(to, FileDtype::F32 | FileDtype::F16 | FileDtype::Bf16)
}

/// Converts as many values as the two slices hold; the formats must be convertible.
pub fn convert(from: FileDtype, bytes: &[u8], to: FileDtype, out: &mut [u8]) {
    if from == to {
        out.copy_from_slice(bytes);
    } else {
        convert_with(from, bytes, to, out, |_, _| ());
    }
}

/// The same with `change`, which gets some values as f32 and the index of the first of them.
pub fn convert_with(
    from: FileDtype,
    bytes: &[u8],
    to: FileDtype,
    out: &mut [u8],
    change: impl Fn(usize, &mut [f32]),
) {
    let mut numbers = [0.0_f32; CHUNK];
    let (from_bytes, to_bytes) = (from.bytes() as usize, to.bytes() as usize);
    let chunks = bytes.chunks(CHUNK * from_bytes).zip(out.chunks_mut(CHUNK * to_bytes));
    for (index, (bytes, out)) in chunks.enumerate() {
        let numbers = &mut numbers[..bytes.len() / from_bytes];
        decode(from, bytes, numbers);
        change(index * CHUNK, numbers);
        encode(numbers, to, out);
    }
}

/// f32 values into bytes of a format that [`can_convert`] allows.
pub fn encode(numbers: &[f32], to: FileDtype, out: &mut [u8]) {
    match to {
        FileDtype::F32 => each(numbers, out, f32::to_le_bytes),
        FileDtype::Bf16 => each(numbers, out, |number| bf16_bits(number).to_le_bytes()),
        FileDtype::F16 => {
            let mut halves = [f16::ZERO; CHUNK];
            for (numbers, out) in numbers.chunks(CHUNK).zip(out.chunks_mut(CHUNK * 2)) {
                let halves = &mut halves[..numbers.len()];
                halves.convert_from_f32_slice(numbers);
                each(halves, out, f16::to_le_bytes);
            }
        }
        _ => unreachable!("callers ask can_convert first"),
    }
}

fn decode(from: FileDtype, bytes: &[u8], numbers: &mut [f32]) {
    match from {
        FileDtype::F64 => read(bytes, numbers, |bytes| f64::from_le_bytes(bytes) as f32),
        FileDtype::F32 => read(bytes, numbers, f32::from_le_bytes),
        FileDtype::Bf16 => read(bytes, numbers, |bytes| bf16::from_le_bytes(bytes).to_f32()),
        FileDtype::F16 => {
            let mut halves = [f16::ZERO; CHUNK];
            let halves = &mut halves[..numbers.len()];
            for (half, bytes) in halves.iter_mut().zip(bytes.chunks_exact(2)) {
                *half = f16::from_le_bytes([bytes[0], bytes[1]]);
            }
            halves.convert_to_f32_slice(numbers);
        }
        FileDtype::F8E4M3 => read(bytes, numbers, |[byte]| F8E4M3[byte as usize]),
        FileDtype::F8E5M2 => read(bytes, numbers, |[byte]| F8E5M2[byte as usize]),
        _ => unreachable!("callers ask can_convert first"),
    }
}

fn read<const N: usize>(bytes: &[u8], numbers: &mut [f32], number: impl Fn([u8; N]) -> f32) {
    let (chunks, _) = bytes.as_chunks::<N>();
    for (out, chunk) in numbers.iter_mut().zip(chunks) {
        *out = number(*chunk);
    }
}

fn each<T: Copy, const N: usize>(numbers: &[T], out: &mut [u8], bytes: impl Fn(T) -> [u8; N]) {
    let (chunks, _) = out.as_chunks_mut::<N>();
    for (chunk, number) in chunks.iter_mut().zip(numbers) {
        *chunk = bytes(*number);
    }
}

/// Round to nearest, ties to even, without a branch so that it becomes vector code.
fn bf16_bits(number: f32) -> u16 {
    let bits = number.to_bits();
    let rounded = (bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16) as u16;
    // Rounding could carry a NaN's last bits into infinity: keep its top and make it quiet.
    if number.is_nan() { (bits >> 16) as u16 | 0x40 } else { rounded }
}

/// All values of the two 8-bit formats. Source: "FP8 formats for deep learning", tables 1 and 2:
/// E4M3 has no infinity and one NaN per sign, E5M2 follows IEEE rules.
const F8E4M3: [f32; 256] = table(4, 3);
const F8E5M2: [f32; 256] = table(5, 2);

const fn table(exponent_bits: u32, mantissa_bits: u32) -> [f32; 256] {
    let mut values = [0.0; 256];
    let mut byte = 0;
    while byte < 256 {
        values[byte] = f32::from_bits(f8_bits(byte as u32, exponent_bits, mantissa_bits));
        byte += 1;
    }
    values
}

/// The f32 bits of an 8-bit number.
const fn f8_bits(byte: u32, exponent_bits: u32, mantissa_bits: u32) -> u32 {
    let sign = (byte >> 7) << 31;
    let exponent = (byte >> mantissa_bits) & ((1 << exponent_bits) - 1);
    let mantissa = byte & ((1 << mantissa_bits) - 1);
    let highest = (1 << exponent_bits) - 1;
    let bias = (1 << (exponent_bits - 1)) - 1;
    if exponent_bits == 4 && exponent == highest && mantissa == 7 {
        return sign | 0x7fc0_0000;
    }
    if exponent_bits == 5 && exponent == highest {
        return sign | 0x7f80_0000 | if mantissa == 0 { 0 } else { 0x0040_0000 };
    }
    if exponent == 0 {
        // Subnormal: shift the mantissa up until its leading one is implied.
        if mantissa == 0 {
            return sign;
        }
        let shift = mantissa.leading_zeros() - (31 - mantissa_bits);
        let fraction = (mantissa << shift) & ((1 << mantissa_bits) - 1);
        return sign | ((127 - bias + 1 - shift) << 23) | (fraction << (23 - mantissa_bits));
    }
    sign | ((exponent + 127 - bias) << 23) | (mantissa << (23 - mantissa_bits))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn to_f32(from: FileDtype, bytes: &[u8]) -> f32 {
        let mut out = [0; 4];
        convert(from, bytes, FileDtype::F32, &mut out);
        f32::from_le_bytes(out)
    }

    #[test]
    fn every_half_survives_the_way_through_f32() {
        for bits in 0..=u16::MAX {
            for dtype in [FileDtype::F16, FileDtype::Bf16] {
                let wide = to_f32(dtype, &bits.to_le_bytes());
                let mut back = [0; 2];
                convert(FileDtype::F32, &wide.to_le_bytes(), dtype, &mut back);
                let back = u16::from_le_bytes(back);
                assert!(
                    back == bits || wide.is_nan(),
                    "{dtype} {bits:#06x} came back as {back:#06x}"
                );
            }
        }
    }

    #[test]
    fn rounding_to_bf16_is_that_of_the_half_crate() {
        let mut bits = 1_u32;
        for _ in 0..200_000 {
            bits = bits.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let number = f32::from_bits(bits);
            assert_eq!(bf16_bits(number), bf16::from_f32(number).to_bits(), "{bits:#010x}");
        }
    }

    #[test]
    fn eight_bit_floats_have_their_published_values() {
        let check = |dtype, byte: u8, value: f32| {
            let found = to_f32(dtype, &[byte]);
            assert!(
                found.to_bits() == value.to_bits() || found.is_nan() && value.is_nan(),
                "{byte:#04x} is {found}"
            );
        };
        check(FileDtype::F8E4M3, 0x7e, 448.0);
        check(FileDtype::F8E4M3, 0x08, 2.0_f32.powi(-6));
        check(FileDtype::F8E4M3, 0x01, 2.0_f32.powi(-9));
        check(FileDtype::F8E4M3, 0x07, 0.875 * 2.0_f32.powi(-6));
        check(FileDtype::F8E4M3, 0x80, -0.0);
        check(FileDtype::F8E4M3, 0xff, f32::NAN);
        check(FileDtype::F8E5M2, 0x7b, 57344.0);
        check(FileDtype::F8E5M2, 0x01, 2.0_f32.powi(-16));
        check(FileDtype::F8E5M2, 0xfc, f32::NEG_INFINITY);
        check(FileDtype::F8E5M2, 0x7d, f32::NAN);
    }

    #[test]
    fn blocks_of_any_length_convert_whole() {
        for count in [0, 1, 1023, 1024, 1025, 5000] {
            let numbers: Vec<u8> = (0..count).flat_map(|i| (i as f32).to_le_bytes()).collect();
            let mut halves = vec![0xff; count * 2];
            convert(FileDtype::F32, &numbers, FileDtype::Bf16, &mut halves);
            let last = halves.as_chunks::<2>().0.last().map(|bytes| bf16::from_le_bytes(*bytes));
            assert_eq!(last, (count > 0).then(|| bf16::from_f32(count as f32 - 1.0)));
        }
    }
}
