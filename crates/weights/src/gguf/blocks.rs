//! GGUF's quantised blocks, turned back into values.
//!
//! A block holds 32 or 256 values as small integers with a common scale. The "K" formats split
//! theirs into sub-blocks, whose own scales are small integers too. Scales are half precision, and
//! everything is little-endian.
//!
//! The order of the operations is that of the `gguf` Python package, so that the results are equal
//! bit for bit. `quantise` and `quantise_k` turn values into blocks, of the formats that hearth writes.

use half::f16;

use crate::gguf::GgufBlockFormat;

/// Turns whole blocks into values. The caller has made room for exactly as many as there are.
pub fn dequantise(format: GgufBlockFormat, blocks: &[u8], out: &mut [f32]) {
    match format {
        GgufBlockFormat::Q4_0 => each(blocks, out, q4_0),
        GgufBlockFormat::Q4_1 => each(blocks, out, q4_1),
        GgufBlockFormat::Q5_0 => each(blocks, out, q5_0),
        GgufBlockFormat::Q5_1 => each(blocks, out, q5_1),
        GgufBlockFormat::Q8_0 => each(blocks, out, q8_0),
        GgufBlockFormat::Q2K => each(blocks, out, q2_k),
        GgufBlockFormat::Q3K => each(blocks, out, q3_k),
        GgufBlockFormat::Q4K => each(blocks, out, q4_k),
        GgufBlockFormat::Q5K => each(blocks, out, q5_k),
        GgufBlockFormat::Q6K => each(blocks, out, q6_k),
    }
}

/// Sizes come from the signature of `one`, so that the compiler knows them in its loops.
fn each<const BYTES: usize, const NUMBERS: usize>(
    blocks: &[u8],
    out: &mut [f32],
    one: impl Fn(&[u8; BYTES], &mut [f32; NUMBERS]),
) {
    let (blocks, bytes_left) = blocks.as_chunks();
    let (out, numbers_left) = out.as_chunks_mut();
    debug_assert_eq!((bytes_left.len(), numbers_left.len()), (0, 0), "whole blocks");
    debug_assert_eq!(blocks.len(), out.len(), "as many blocks as there is room for");
    for (block, out) in blocks.iter().zip(out) {
        one(block, out);
    }
}

/// `scale f16 | 16 bytes of two 4-bit integers`: scale × (integer − 8).
fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, integer) in out.iter_mut().zip(four_bits(&block[2..])) {
        *out = scale * (f32::from(integer) - 8.0);
    }
}

/// `scale f16 | least f16 | 16 bytes of two 4-bit integers`: scale × integer + least.
fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for (out, integer) in out.iter_mut().zip(four_bits(&block[4..])) {
        *out = scale * f32::from(integer) + least;
    }
}

/// `scale f16 | fifth bits u32 | 16 bytes of two 4-bit integers`: scale × (integer − 16).
fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, integer) in out.iter_mut().zip(five_bits(&block[2..6], &block[6..])) {
        *out = scale * (f32::from(integer) - 16.0);
    }
}

/// `scale f16 | least f16 | fifth bits u32 | 16 bytes of two 4-bit integers`:
/// scale × integer + least.
fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let (scale, least) = (half_at(block, 0), half_at(block, 2));
    for (out, integer) in out.iter_mut().zip(five_bits(&block[4..8], &block[8..])) {
        *out = scale * f32::from(integer) + least;
    }
}

/// `scale f16 | 32 signed integers of 8 bits`: scale × integer.
fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let scale = half_at(block, 0);
    for (out, integer) in out.iter_mut().zip(&block[2..]) {
        *out = scale * f32::from(integer.cast_signed());
    }
}

/// `16 bytes of a 4-bit scale and a 4-bit offset | 64 bytes of four 2-bit integers | scale f16 | scale of the offsets
/// f16`: sixteen sub-blocks of scale × integer − offset. Each half of the block has 32 bytes, in which bits 2n and
/// 2n + 1 are its n-th run of 32 values.
fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scale, offset) = (half_at(block, 80), half_at(block, 82));
    for (at, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let of_scale = scale * f32::from(nibble(block[at], 0));
        let of_offset = offset * f32::from(nibble(block[at], 1));
        for (out, integer) in out.iter_mut().zip(two_bits(&block[16..80], at)) {
            *out = of_scale * f32::from(integer) - of_offset;
        }
    }
}

/// `32 bytes of third bits | 64 bytes of four lower 2 bits | 12 bytes of sub-block scales of 6 bits | scale f16`:
/// sixteen sub-blocks of scale × integer, four less where the third bit is 0. Bit n of the 32 bytes is that of the
/// n-th run of 32 values.
fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (scale, scales) = (half_at(block, 108), &block[96..108]);
    for (at, out) in out.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let upper = (scales[8 + at % 4] >> (at / 4 * 2)) & 3;
        let sub_scale = (nibble(scales[at % 8], at / 8) | upper << 4).cast_signed() - 32;
        let sub_scale = scale * f32::from(sub_scale);
        let third = &block[at % 2 * 16..];
        for ((out, integer), third) in out.iter_mut().zip(two_bits(&block[32..96], at)).zip(third) {
            let lower = if (third >> (at / 2)) & 1 == 0 { 4 } else { 0 };
            *out = sub_scale * f32::from(integer.cast_signed() - lower);
        }
    }
}

/// The 16 integers of sub-block `at` of [`q2_k`] and [`q3_k`].
fn two_bits(packed: &[u8], at: usize) -> [u8; 16] {
    let (half, run, side) = (at / 8, at % 8 / 2, at % 2);
    std::array::from_fn(|i| (packed[half * 32 + side * 16 + i] >> (run * 2)) & 3)
}

/// `scale f16 | scale of the offsets f16 | 12 bytes of sub-block scales and offsets | 128 bytes of
/// two 4-bit integers`: eight sub-blocks of scale × integer − offset. Two neighbours share 32
/// bytes: the low halves belong to the first.
fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (integers, _) = block[16..].as_chunks::<32>();
    for (at, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, offset) = sub_block(block, at);
        for (out, byte) in out.iter_mut().zip(integers[at / 2]) {
            *out = scale * f32::from(nibble(byte, at % 2)) - offset;
        }
    }
}

/// As [`q4_k`], with 32 bytes before the integers whose bit *n* is the fifth bit in sub-block *n*.
fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let fifth = &block[16..48];
    let (integers, _) = block[48..].as_chunks::<32>();
    for (at, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (scale, offset) = sub_block(block, at);
        for ((out, byte), fifth) in out.iter_mut().zip(integers[at / 2]).zip(fifth) {
            let integer = nibble(byte, at % 2) | ((fifth >> at) & 1) << 4;
            *out = scale * f32::from(integer) - offset;
        }
    }
}

/// `128 bytes of two lower 4 bits | 64 bytes of four upper 2 bits | 16 signed sub-block scales of
/// 8 bits | scale f16`: sixteen sub-blocks of scale × (integer − 32). Each half of the block has
/// its own half of both bit fields, and lies there in four runs of 32 values.
fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let scale = half_at(block, 208);
    let scales = &block[192..208];
    let (lower, _) = block[..128].as_chunks::<32>();
    let (upper, _) = block[128..192].as_chunks::<32>();
    for (at, out) in out.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        let (half, run) = (at / 4, at % 4);
        let (lower, upper) = (&lower[half * 2 + run % 2], &upper[half]);
        for (i, out) in out.iter_mut().enumerate() {
            let sub_scale = scale * f32::from(scales[at * 2 + i / 16].cast_signed());
            let integer = nibble(lower[i], run / 2) | ((upper[i] >> (run * 2)) & 3) << 4;
            *out = sub_scale * (f32::from(integer) - 32.0);
        }
    }
}

fn half_at(block: &[u8], at: usize) -> f32 {
    f16::from_le_bytes([block[at], block[at + 1]]).to_f32()
}

/// The low (0) or the high (1) half of a byte.
fn nibble(byte: u8, which: usize) -> u8 {
    (byte >> (which * 4)) & 15
}

/// 32 integers from 16 bytes: the low halves of all, then the high halves.
fn four_bits(packed: &[u8]) -> [u8; 32] {
    std::array::from_fn(|i| nibble(packed[i % 16], i / 16))
}

/// As [`four_bits`], with bit *n* of `fifth` on top of integer *n*.
fn five_bits(fifth: &[u8], packed: &[u8]) -> [u8; 32] {
    let lower = four_bits(packed);
    std::array::from_fn(|i| lower[i] | ((fifth[i / 8] >> (i % 8)) & 1) << 4)
}

/// Scale and offset of sub-block `at` of [`q4_k`] and [`q5_k`]. Eight of each, six bits wide, lie
/// in the twelve bytes after the two halves:
///
/// ```text
/// bytes 0..4     scales 0..4,  above them the top two bits of scales 4..8
/// bytes 4..8     offsets 0..4, above them the top two bits of offsets 4..8
/// bytes 8..12    low four bits of scales 4..8, above them those of offsets 4..8
/// ```
fn sub_block(block: &[u8], at: usize) -> (f32, f32) {
    let packed = &block[4..16];
    let (scale, offset) = if at < 4 {
        (packed[at] & 63, packed[at + 4] & 63)
    } else {
        let low = packed[at + 4];
        (nibble(low, 0) | packed[at - 4] >> 6 << 4, nibble(low, 1) | packed[at] >> 6 << 4)
    };
    (half_at(block, 0) * f32::from(scale), half_at(block, 2) * f32::from(offset))
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::tensor::TensorEncoding;

    const FIXTURE: &str =
        concat!(env!("CARGO_MANIFEST_DIR"), "/../../tests/golden/weights/mixed.gguf");

    /// The values the Python package makes of a tensor of the fixture.
    fn expected(name: &str, count: usize) -> Vec<u32> {
        let json = std::fs::read_to_string(format!("{FIXTURE}.json")).unwrap();
        let json: serde_json::Value = serde_json::from_str(&json).unwrap();
        let tensors = json["tensors"].as_array().unwrap();
        let tensor = tensors.iter().find(|tensor| tensor["name"] == name).unwrap();
        let start = tensor["f32_offset"].as_u64().unwrap() as usize;
        let numbers = std::fs::read(format!("{FIXTURE}.f32.bin")).unwrap();
        let (numbers, _) = numbers[start..start + count * 4].as_chunks();
        numbers.iter().map(|bytes| u32::from_le_bytes(*bytes)).collect()
    }

    fn check(format: GgufBlockFormat) {
        let contents = crate::gguf::read(Path::new(FIXTURE), 0).unwrap();
        let wanted = TensorEncoding::Blocks(format);
        let tensor = contents.tensors.iter().find(|tensor| tensor.encoding == wanted).unwrap();
        let file = std::fs::read(FIXTURE).unwrap();
        let blocks = &file[tensor.offset as usize..][..tensor.bytes as usize];
        let mut out = vec![f32::NAN; tensor.numel() as usize];
        dequantise(format, blocks, &mut out);
        let bits: Vec<u32> = out.iter().map(|number| number.to_bits()).collect();
        assert_eq!(bits, expected(&tensor.name, out.len()), "{}", tensor.name);
    }

    #[test]
    fn numbers_are_those_of_the_python_package() {
        for format in [
            GgufBlockFormat::Q4_0,
            GgufBlockFormat::Q4_1,
            GgufBlockFormat::Q5_0,
            GgufBlockFormat::Q5_1,
            GgufBlockFormat::Q8_0,
            GgufBlockFormat::Q4K,
            GgufBlockFormat::Q5K,
            GgufBlockFormat::Q6K,
        ] {
            check(format);
        }
    }

    #[test]
    fn nothing_becomes_nothing() {
        dequantise(GgufBlockFormat::Q6K, &[], &mut []);
    }
}
