//! Functions of one f32 in plain arithmetic without branches, so that the compiler turns loops over
//! them into vectors. Each states its largest error, which a test measures.

/// e to the x, within 2 units in the last place; infinity above 88.72, 0 below -87.33, where f32
/// would be subnormal. NaN stays NaN.
///
/// exp(x) = 2^n · exp(r) with |r| ≤ ln 2 / 2; the polynomial is the one of Cephes (expf).
#[inline(always)]
pub(crate) fn exp(x: f32) -> f32 {
    const LOG2_E: f32 = std::f32::consts::LOG2_E;
    // ln 2 in two parts, so that n · ln 2 is exact enough.
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    // Adding and subtracting 1.5 · 2^23 rounds to the nearest integer without a branch.
    const ROUND: f32 = 12_582_912.0;
    const HIGHEST: f32 = 88.722_84;
    const LOWEST: f32 = -87.336_54;
    let bounded = if x > HIGHEST { HIGHEST } else { x };
    let bounded = if bounded < LOWEST { LOWEST } else { bounded };
    let shifted = bounded * LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = bounded - n * LN_2_HIGH - n * LN_2_LOW;
    let mut p = 1.987_569_1e-4;
    p = p * r + 1.398_199_9e-3;
    p = p * r + 8.333_452e-3;
    p = p * r + 4.166_579_6e-2;
    p = p * r + 1.666_666_5e-1;
    p = p * r + 0.5;
    let mantissa = p * r * r + r + 1.0;
    // 2^n in two factors: n may be 128, which one exponent field cannot hold.
    let n = shifted.to_bits().wrapping_sub(ROUND.to_bits()).cast_signed();
    let half = n >> 1;
    let power = |n: i32| f32::from_bits(((n + 127) << 23) as u32);
    let value = mantissa * power(half) * power(n - half);
    let value = if x > HIGHEST { f32::INFINITY } else { value };
    let value = if x < LOWEST { 0.0 } else { value };
    if x.is_nan() { x } else { value }
}

/// The natural logarithm, within 2 units in the last place, also near 1; minus infinity of 0,
/// NaN below. NaN stays NaN.
///
/// ln(x) = n · ln 2 + ln(1 + r) with √½ ≤ 1 + r < √2; the polynomial is the one of Cephes (logf).
#[inline(always)]
pub(crate) fn ln(x: f32) -> f32 {
    const LN_2_HIGH: f32 = 0.693_359_4;
    const LN_2_LOW: f32 = -2.121_944_4e-4;
    const TWO_23: f32 = 8_388_608.0;
    const SQRT_HALF_BITS: u32 = std::f32::consts::FRAC_1_SQRT_2.to_bits();
    let is_small = x < f32::MIN_POSITIVE;
    let bits = if is_small { x * TWO_23 } else { x }.to_bits();
    // The exponent counted from √½ instead of 1, so that what is left lies around 1.
    let above = bits.wrapping_sub(SQRT_HALF_BITS).cast_signed();
    let exponent = above >> 23;
    let r = f32::from_bits((above & 0x7f_ffff).cast_unsigned() + SQRT_HALF_BITS) - 1.0;
    let n = (exponent - if is_small { 23 } else { 0 }) as f32;
    let mut p = 7.037_683_6e-2;
    p = p * r - 1.151_461e-1;
    p = p * r + 1.167_699_9e-1;
    p = p * r - 1.242_014_1e-1;
    p = p * r + 1.424_932_3e-1;
    p = p * r - 1.666_805_8e-1;
    p = p * r + 2.000_071_5e-1;
    p = p * r - 2.499_999_4e-1;
    p = p * r + 0.333_333_3;
    let square = r * r;
    let value = p * r * square + n * LN_2_LOW - 0.5 * square + r + n * LN_2_HIGH;
    let value = if x < f32::INFINITY { value } else { x };
    let value = if x == 0.0 { f32::NEG_INFINITY } else { value };
    if x < 0.0 { f32::NAN } else { value }
}

/// 1 / (1 + e^-x), within 4 units in the last place.
#[inline(always)]
pub(crate) fn sigmoid(x: f32) -> f32 {
    1.0 / (1.0 + exp(-x))
}

/// The complementary error function, within a relative error of 2e-6 down to 1e-8, and an absolute
/// one of 3e-7 everywhere.
///
/// Numerical Recipes, section 6.2: a Chebyshev fit of fractional error below 1.2e-7.
#[inline(always)]
pub(crate) fn erfc(x: f32) -> f32 {
    let positive = x.abs();
    let t = 1.0 / (1.0 + 0.5 * positive);
    let mut p = 0.170_872_77;
    p = p * t - 0.822_152_23;
    p = p * t + 1.488_515_9;
    p = p * t - 1.135_204;
    p = p * t + 0.278_868_08;
    p = p * t - 0.186_288_06;
    p = p * t + 0.096_784_18;
    p = p * t + 0.374_091_96;
    p = p * t + 1.000_023_7;
    p = p * t - 1.265_512_2;
    let tail = t * exp(-positive * positive + p);
    if x < 0.0 { 2.0 - tail } else { tail }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn worst(
        range: std::ops::Range<f32>,
        ours: impl Fn(f32) -> f32,
        exact: impl Fn(f64) -> f64,
    ) -> f64 {
        let count = 200_000;
        let width = (range.end - range.start) / count as f32;
        let at = |index: i32| range.start + index as f32 * width;
        (0..count)
            .map(|index| {
                let expected = exact(f64::from(at(index)));
                (f64::from(ours(at(index))) - expected).abs() / expected.abs()
            })
            .fold(0.0, f64::max)
    }

    #[test]
    fn errors_are_as_stated() {
        let unit = f64::from(f32::EPSILON) / 2.0;
        let exponential = worst(-87.0..88.7, exp, f64::exp);
        assert!(exponential < 2.0 * unit * 1.01, "{}", exponential / unit);
        let sigmoid = worst(-80.0..20.0, sigmoid, |x| 1.0 / (1.0 + (-x).exp()));
        assert!(sigmoid < 8.0 * unit, "{}", sigmoid / unit);
        for range in [1e-7..1e-3, 1e-3..0.999, 1.001..30.0, 30.0..3e38] {
            let logarithm = worst(range.clone(), ln, f64::ln);
            assert!(logarithm < 2.0 * unit * 1.01, "{range:?}: {}", logarithm / unit);
        }
        // Near 1, where the result is near 0 and only the small difference counts.
        let near_one = worst(0.999..1.0, ln, f64::ln);
        assert!(near_one < 2.0 * unit * 1.01, "{}", near_one / unit);
        let tail = worst(-6.0..4.0, erfc, crate::testing::erfc);
        assert!(tail < 2e-6, "{tail}");
    }

    #[test]
    fn the_ends_of_the_range_are_right() {
        assert_eq!(
            (exp(89.0), exp(f32::INFINITY), exp(-88.0)),
            (f32::INFINITY, f32::INFINITY, 0.0)
        );
        assert_eq!((exp(f32::NEG_INFINITY), exp(0.0)), (0.0, 1.0));
        assert!(exp(f32::NAN).is_nan() && sigmoid(f32::NAN).is_nan() && erfc(f32::NAN).is_nan());
        assert!(exp(88.7).is_finite());
        assert_eq!((ln(1.0), ln(0.0), ln(-0.0)), (0.0, f32::NEG_INFINITY, f32::NEG_INFINITY));
        assert_eq!(ln(f32::INFINITY), f32::INFINITY);
        assert!(ln(f32::NAN).is_nan() && ln(-1.0).is_nan() && ln(f32::NEG_INFINITY).is_nan());
        assert!((ln(1e-42) - (f64::from(1e-42f32)).ln() as f32).abs() < 1e-5);
        assert_eq!((sigmoid(-200.0), sigmoid(200.0)), (0.0, 1.0));
    }
}
