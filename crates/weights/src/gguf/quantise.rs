//! Values into the blocks of 32 that hold each value as an integer with the block's scale; `blocks` turns them back and
//! draws them, `quantise_k` makes those of 256.
//!
//! Results are equal bit for bit to those of llama.cpp without an importance matrix, so the order of operations is its own.

use half::f16;

use super::quantise_k::{q4_k, q5_k, q6_k};
use super::write::GgufFormat;

/// The largest magnitude that survives a format: what its scale or its offset has room for.
pub(super) fn largest(format: GgufFormat) -> f32 {
    let half = f16::MAX.to_f32();
    match format {
        GgufFormat::F32 | GgufFormat::Bf16 => f32::MAX,
        // The least value of a block of Q5_1 is stored as it is.
        GgufFormat::F16 | GgufFormat::Q5_1 => half,
        GgufFormat::Q5_0 => half * 16.0,
        GgufFormat::Q8_0 => half * Q8_0_MOST,
        // Offsets are 6-bit multiples of a half; the scales of Q6_K multiples up to 127, of integers up to 31.
        GgufFormat::Q4K | GgufFormat::Q5K => half * 63.0,
        GgufFormat::Q6K => half * 127.0 * 31.0,
    }
}

/// Turns whole blocks of values into a format that has blocks. The caller has made room for exactly as many.
pub(super) fn quantise(format: GgufFormat, numbers: &[f32], out: &mut [u8]) {
    match format {
        GgufFormat::Q5_0 => each(numbers, out, q5_0),
        GgufFormat::Q5_1 => each(numbers, out, q5_1),
        GgufFormat::Q8_0 => each(numbers, out, q8_0),
        GgufFormat::Q4K => each(numbers, out, q4_k),
        GgufFormat::Q5K => each(numbers, out, q5_k),
        GgufFormat::Q6K => each(numbers, out, q6_k),
        GgufFormat::F32 | GgufFormat::F16 | GgufFormat::Bf16 => unreachable!("they have no blocks"),
    }
}

/// Sizes come from the signature of `one`, so that the compiler knows them in its loops.
fn each<const NUMBERS: usize, const BYTES: usize>(
    numbers: &[f32],
    out: &mut [u8],
    one: impl Fn(&[f32; NUMBERS]) -> [u8; BYTES],
) {
    let (numbers, numbers_left) = numbers.as_chunks();
    let (out, bytes_left) = out.as_chunks_mut();
    debug_assert_eq!((numbers_left.len(), bytes_left.len()), (0, 0), "whole blocks");
    for (numbers, out) in numbers.iter().zip(out) {
        *out = one(numbers);
    }
}

/// The largest integer of `Q8_0`. Taken: `block_q8_0` of llama.cpp.
const Q8_0_MOST: f32 = 127.0;

fn q8_0(numbers: &[f32; 32]) -> [u8; 34] {
    let largest = numbers.iter().fold(0.0, |most: f32, number| most.max(number.abs()));
    let scale = largest / Q8_0_MOST;
    let inverse = inverse(scale);
    let mut block = [0; 34];
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    for (byte, number) in block[2..].iter_mut().zip(numbers) {
        *byte = ((number * inverse).round() as i8).cast_unsigned();
    }
    block
}

/// The number of largest magnitude becomes −16, so that the side it is on has one integer more.
fn q5_0(numbers: &[f32; 32]) -> [u8; 22] {
    let larger = |most: f32, number: &f32| if number.abs() > most.abs() { *number } else { most };
    let scale = numbers.iter().fold(0.0, larger) / -16.0;
    let inverse = inverse(scale);
    let integers = numbers.map(|number| ((number * inverse + 16.5) as u8).min(31));
    let mut block = [0; 22];
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    put_five_bits(&integers, &mut block[2..]);
    block
}

fn q5_1(numbers: &[f32; 32]) -> [u8; 24] {
    let least = numbers.iter().fold(f32::MAX, |least, number| number.min(least));
    let most = numbers.iter().fold(f32::MIN, |most, number| number.max(most));
    let scale = (most - least) / 31.0;
    let inverse = inverse(scale);
    let integers = numbers.map(|number| (((number - least) * inverse + 0.5) as u8).min(31));
    let mut block = [0; 24];
    block[..2].copy_from_slice(&f16::from_f32(scale).to_le_bytes());
    block[2..4].copy_from_slice(&f16::from_f32(least).to_le_bytes());
    put_five_bits(&integers, &mut block[4..]);
    block
}

fn inverse(scale: f32) -> f32 {
    if scale == 0.0 { 0.0 } else { 1.0 / scale }
}

/// `fifth bits u32 | 16 bytes of two 4-bit integers`: the low halves are the first 16 integers.
fn put_five_bits(integers: &[u8; 32], out: &mut [u8]) {
    let fifth =
        integers.iter().rev().fold(0, |bits: u32, integer| bits << 1 | u32::from(integer >> 4));
    out[..4].copy_from_slice(&fifth.to_le_bytes());
    for (at, byte) in out[4..].iter_mut().enumerate() {
        *byte = integers[at] & 15 | integers[at + 16] << 4;
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::Catalog;
    use crate::gguf::GgufBlockFormat;
    use crate::gguf::blocks::dequantise;
    use crate::load::load_f32;
    use crate::tensor::TensorEncoding;

    const FIXTURE: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/quantised.gguf");

    const ALL: [GgufFormat; 6] = [
        GgufFormat::Q5_0,
        GgufFormat::Q5_1,
        GgufFormat::Q8_0,
        GgufFormat::Q4K,
        GgufFormat::Q5K,
        GgufFormat::Q6K,
    ];

    fn values_of(format: GgufBlockFormat, blocks: &[u8]) -> Vec<u32> {
        let count = blocks.len() as u64 / format.bytes() * format.values_per_block();
        let mut out = vec![0.0; count as usize];
        dequantise(format, blocks, &mut out);
        out.iter().map(|value| value.to_bits()).collect()
    }

    /// What llama.cpp makes of all kinds of numbers: see `generate_quantised.py`.
    #[test]
    fn blocks_are_those_of_llama_cpp() {
        let catalog = Catalog::open(Path::new(FIXTURE)).unwrap();
        let file = std::fs::read(FIXTURE).unwrap();
        let values = catalog.find("values").unwrap();
        let numbers = load_f32(&catalog, values, 0..values.numel()).unwrap();
        for format in ALL {
            let TensorEncoding::Blocks(blocks) = format.encoding() else { unreachable!() };
            let theirs = catalog.find(&blocks.to_string()).unwrap();
            assert_eq!(theirs.encoding, format.encoding());
            let theirs = &file[theirs.offset as usize..][..theirs.bytes as usize];
            let mut ours = vec![0; theirs.len()];
            quantise(format, &numbers, &mut ours);
            // In the last four rows some scales become zero, and integers have no meaning.
            let clear = numbers.len() - 4 * 256;
            let clear = format.encoding().bytes_for(clear as u64).unwrap() as usize;
            assert!(ours[..clear] == theirs[..clear], "{blocks}");
            let [ours, theirs] = [&ours[..], theirs].map(|it| values_of(blocks, it));
            let is_same = |(a, b): (&u32, &u32)| f32::from_bits(*a) == f32::from_bits(*b);
            assert!(ours.iter().zip(&theirs).all(is_same), "{blocks}");
        }
    }

    /// Blocks of the largest numbers that are let through are finite.
    #[test]
    fn the_largest_numbers_have_scales() {
        for format in ALL {
            let most = largest(format);
            for numbers in [vec![most; 256], vec![-most; 256], [most, -most].repeat(128)] {
                let mut out = vec![0; format.encoding().bytes_for(256).unwrap() as usize];
                quantise(format, &numbers, &mut out);
                let TensorEncoding::Blocks(blocks) = format.encoding() else { unreachable!() };
                let near = |(bits, number): (u32, &f32)| {
                    let value = f32::from_bits(bits);
                    value.is_finite() && (value / number - 1.0).abs() < 0.07
                };
                assert!(values_of(blocks, &out).into_iter().zip(&numbers).all(near), "{blocks}");
            }
        }
    }
}
