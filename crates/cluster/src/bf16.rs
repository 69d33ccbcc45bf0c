//! bf16 on the wire: the upper half of an f32.

/// Rounded to the nearest, ties to even; what is not a number stays so.
pub fn from_f32(value: f32) -> u16 {
    let bits = value.to_bits();
    if value.is_nan() {
        return (bits >> 16) as u16 | 0x40;
    }
    ((bits + 0x7fff + ((bits >> 16) & 1)) >> 16) as u16
}

/// Exact.
pub fn to_f32(bits: u16) -> f32 {
    f32::from_bits(u32::from(bits) << 16)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_rounded_to_the_nearest() {
        for (value, rounded) in [
            (1.0, 1.0),
            (1.0 + 1.0 / 256.0, 1.0),
            (1.0 + 1.001 / 256.0, 1.0 + 1.0 / 128.0),
            (1.0 + 3.0 / 256.0, 1.0 + 1.0 / 64.0),
            (f32::MAX, f32::INFINITY),
            (f32::NEG_INFINITY, f32::NEG_INFINITY),
        ] {
            assert_eq!(to_f32(from_f32(value)), rounded, "{value}");
        }
        assert!(to_f32(from_f32(f32::NAN)).is_nan());
        assert!(to_f32(from_f32(f32::from_bits(0x7f80_0001))).is_nan());
    }
}
