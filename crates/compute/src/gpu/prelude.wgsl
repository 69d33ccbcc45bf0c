// What every kernel begins with: dtypes, sums over a workgroup of threads, functions, activations,
// random numbers. Declarations of a kernel's own tensors and numbers come before it (`template.rs`).
//
// Arithmetic is f32 whatever the storage. Every sum has one order, whatever the GPU is doing. NaN
// is found by its bits: Metal's compiler assumes that floats are finite.

const NONE: u32 = 0xffffffffu;
// Below every number that is finite, and finite itself.
const LOWEST: f32 = -3.4028235e38;

fn is_finite(x: f32) -> bool { return (bitcast<u32>(x) & 0x7f800000u) != 0x7f800000u; }
fn is_nan(x: f32) -> bool { return (bitcast<u32>(x) & 0x7fffffffu) > 0x7f800000u; }

// NaN may not be written as a constant.
fn not_a_number() -> f32 { var bits = 0x7fc00000u; return bitcast<f32>(bits); }
fn infinity() -> f32 { var bits = 0x7f800000u; return bitcast<f32>(bits); }

// Two numbers of 16 bits are a word, the first in its lower half.
fn from_bf16(word: u32) -> vec2<f32> {
    return vec2<f32>(bitcast<f32>(word << 16u), bitcast<f32>(word & 0xffff0000u));
}

fn from_f16(word: u32) -> vec2<f32> { return unpack2x16float(word); }

// To nearest, ties to even; NaN stays so.
fn to_bf16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let rounded = (bits + 0x7fffu + ((bits >> 16u) & 1u)) >> 16u;
    return select(rounded, (bits >> 16u) | 0x40u, is_nan(x));
}

// The same in integers: how the built-in function rounds is left open.
fn to_f16(x: f32) -> u32 {
    let bits = bitcast<u32>(x);
    let sign = (bits >> 16u) & 0x8000u;
    let size = bits & 0x7fffffffu;
    // Rounds to infinity from here on.
    if size >= 0x477ff000u { return sign | select(0x7c00u, 0x7e00u, size > 0x7f800000u); }
    let normal = size - 0x38000000u;
    if size >= 0x38800000u { return sign | ((normal + 0xfffu + ((normal >> 13u) & 1u)) >> 13u); }
    // Below the smallest exponent: whole multiples of 2^-24.
    let shift = 126u - (size >> 23u);
    if shift > 24u { return sign; }
    let mantissa = (size & 0x7fffffu) | 0x800000u;
    let whole = mantissa >> shift;
    let rest = mantissa & ((1u << shift) - 1u);
    let half = 1u << (shift - 1u);
    return sign | (whole + select(0u, 1u, rest > half || (rest == half && (whole & 1u) == 1u)));
}

fn pack_bf16(x: vec2<f32>) -> u32 { return to_bf16(x.x) | (to_bf16(x.y) << 16u); }
fn pack_f16(x: vec2<f32>) -> u32 { return to_f16(x.x) | (to_f16(x.y) << 16u); }

fn bytes_of(word: u32) -> vec4<u32> {
    return (vec4<u32>(word) >> vec4<u32>(0u, 8u, 16u, 24u)) & vec4<u32>(0xffu);
}

// Eight numbers, or codes of some, that lie beside each other.
struct Eight { low: vec4<f32>, high: vec4<f32> }
struct Codes { low: vec4<u32>, high: vec4<u32> }

const FIRST_FOUR: vec4<u32> = vec4<u32>(0u, 1u, 2u, 3u);

// What is not there.
fn nothing() -> Eight { return Eight(vec4<f32>(0.0), vec4<f32>(0.0)); }

// The first n alone; the others become zeros.
fn only(x: Eight, n: u32) -> Eight {
    return Eight(select(vec4<f32>(0.0), x.low, FIRST_FOUR < vec4<u32>(n)),
                 select(vec4<f32>(0.0), x.high, FIRST_FOUR + 4u < vec4<u32>(n)));
}

fn sum_of_eight(x: Eight) -> f32 {
    let four = x.low + x.high;
    return (four.x + four.y) + (four.z + four.w);
}

fn less(x: Eight, number: f32) -> Eight { return Eight(x.low - number, x.high - number); }
fn multiplied(a: Eight, b: Eight) -> Eight { return Eight(a.low * b.low, a.high * b.high); }
fn plus(a: Eight, b: Eight) -> Eight { return Eight(a.low + b.low, a.high + b.high); }
fn times(factor: f32, x: Eight) -> Eight { return Eight(factor * x.low, factor * x.high); }

// Eight lines of eight numbers; a column of a matrix is a part of a line. Lines 0 to 3 are a and b, 4 to 7
// are c and d; a and c have the first four numbers of each.
struct Tile { a: mat4x4<f32>, b: mat4x4<f32>, c: mat4x4<f32>, d: mat4x4<f32> }

fn tile(q: Eight, r: Eight, s: Eight, t: Eight, u: Eight, v: Eight, w: Eight, x: Eight) -> Tile {
    return Tile(mat4x4<f32>(q.low, r.low, s.low, t.low), mat4x4<f32>(q.high, r.high, s.high, t.high),
                mat4x4<f32>(u.low, v.low, w.low, x.low), mat4x4<f32>(u.high, v.high, w.high, x.high));
}

fn flipped(t: Tile) -> Tile {
    return Tile(transpose(t.a), transpose(t.c), transpose(t.b), transpose(t.d));
}

fn scaled(factor: f32, t: Tile) -> Tile {
    return Tile(factor * t.a, factor * t.b, factor * t.c, factor * t.d);
}

fn sum_of(t: Tile, u: Tile) -> Tile { return Tile(t.a + u.a, t.b + u.b, t.c + u.c, t.d + u.d); }

// Adds rows * columns, where a row is a line and a column goes across all lines. What is summed up here, eight
// values at a time, is a sum of its own: one long sum would lose the last of its digits.
fn add_matmul(sums: Tile, rows: Tile, columns: Tile) -> Tile {
    return Tile(sums.a + (columns.a * rows.a + columns.c * rows.b),
                sums.b + (columns.b * rows.a + columns.d * rows.b),
                sums.c + (columns.a * rows.c + columns.c * rows.d),
                sums.d + (columns.b * rows.c + columns.d * rows.d));
}

// A line of a tile, and the tile with another in its place. By number, so that loops over all
// lines are short; compilers for GPUs unroll their loops.
fn line_of(t: Tile, i: u32) -> Eight {
    let is_odd = (i & 1u) == 1u;
    let is_far = (i & 2u) == 2u;
    if i < 4u {
        return Eight(select(select(t.a[0], t.a[1], is_odd), select(t.a[2], t.a[3], is_odd), is_far),
                     select(select(t.b[0], t.b[1], is_odd), select(t.b[2], t.b[3], is_odd), is_far));
    }
    return Eight(select(select(t.c[0], t.c[1], is_odd), select(t.c[2], t.c[3], is_odd), is_far),
                 select(select(t.d[0], t.d[1], is_odd), select(t.d[2], t.d[3], is_odd), is_far));
}

fn column_set(m: mat4x4<f32>, i: u32, x: vec4<f32>) -> mat4x4<f32> {
    return mat4x4<f32>(select(m[0], x, i == 0u), select(m[1], x, i == 1u), select(m[2], x, i == 2u),
                       select(m[3], x, i == 3u));
}

fn with_line(t: Tile, i: u32, x: Eight) -> Tile {
    return Tile(column_set(t.a, i, x.low), column_set(t.b, i, x.high), column_set(t.c, i - 4u, x.low),
                column_set(t.d, i - 4u, x.high));
}

// The larger one; NaN is larger than all.
fn larger(a: f32, b: f32) -> f32 { return select(b, a, a > b || is_nan(a)); }

var<workgroup> group_parts: array<f32, THREADS>;

// The sum of what the threads of a workgroup hold, known to all of them.
fn group_sum(lane: u32, x: f32) -> f32 {
    group_parts[lane] = x;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if lane < step { group_parts[lane] += group_parts[lane + step]; }
        workgroupBarrier();
    }
    let sum = group_parts[0];
    workgroupBarrier();
    return sum;
}

fn group_max(lane: u32, x: f32) -> f32 {
    group_parts[lane] = x;
    workgroupBarrier();
    for (var step = THREADS / 2u; step > 0u; step /= 2u) {
        if lane < step { group_parts[lane] = larger(group_parts[lane], group_parts[lane + step]); }
        workgroupBarrier();
    }
    let most = group_parts[0];
    workgroupBarrier();
    return most;
}

// The sums of rows of PER_ROW threads, each known to its row.
fn row_sum(lane: u32, x: f32) -> f32 {
    if PER_ROW == 1u { return x; }
    group_parts[lane] = x;
    workgroupBarrier();
    let place = lane % PER_ROW;
    for (var step = PER_ROW / 2u; step > 0u; step /= 2u) {
        if place < step { group_parts[lane] += group_parts[lane + step]; }
        workgroupBarrier();
    }
    let sum = group_parts[lane - place];
    workgroupBarrier();
    return sum;
}

fn two_to(n: i32) -> f32 { return bitcast<f32>(u32(n + 127) << 23u); }

// Codes of quantised numbers.
fn from_int8(code: u32) -> f32 { return f32(bitcast<i32>(code << 24u) >> 24u); }

// A sign, four bits of exponent, three of fraction. Made of whole numbers: what is below the smallest
// exponent of f32 may be taken for zero on the way.
fn from_e4m3(code: u32) -> f32 {
    let exponent = (code >> 3u) & 15u;
    let fraction = code & 7u;
    var size = f32(fraction) * two_to(-9);
    if exponent > 0u { size = f32(8u + fraction) * two_to(i32(exponent) - 10); }
    if (code & 0x7fu) == 0x7fu { return not_a_number(); }
    return select(size, -size, code > 127u);
}

// e to the x by the polynomial of Cephes (expf), as on the CPU: the built-in function may be off
// by dozens of units.
fn exponential(x: f32) -> f32 {
    let bounded = clamp(x, -87.33654, 88.72284);
    let n = round(bounded * 1.442695);
    let r = (bounded - n * 0.6933594) - n * -2.1219444e-4;
    var p = 1.9875691e-4;
    p = p * r + 1.3981999e-3;
    p = p * r + 8.333452e-3;
    p = p * r + 4.1665796e-2;
    p = p * r + 1.6666665e-1;
    p = p * r + 0.5;
    let half = i32(n) >> 1u;
    var value = (p * r * r + r + 1.0) * two_to(half) * two_to(i32(n) - half);
    value = select(value, infinity(), x > 88.72284);
    value = select(value, 0.0, x < -87.33654);
    return select(value, x, is_nan(x));
}

// The natural logarithm by the polynomial of Cephes (logf), as on the CPU, of what is above zero.
fn logarithm(x: f32) -> f32 {
    if x == 0.0 { return -infinity(); }
    if x < 0.0 { return not_a_number(); }
    if !is_finite(x) { return x; }
    let is_small = x < 1.1754944e-38;
    let bits = bitcast<u32>(select(x, x * 8388608.0, is_small));
    let root_of_half = 0x3f3504f3u;
    let above = bitcast<i32>(bits - root_of_half);
    let n = f32((above >> 23u) - select(0, 23, is_small));
    let r = bitcast<f32>(bitcast<u32>(above & 0x7fffff) + root_of_half) - 1.0;
    var p = 7.0376836e-2;
    p = p * r - 1.151461e-1;
    p = p * r + 1.1676999e-1;
    p = p * r - 1.2420141e-1;
    p = p * r + 1.4249323e-1;
    p = p * r - 1.6668058e-1;
    p = p * r + 2.0000715e-1;
    p = p * r - 2.4999994e-1;
    p = p * r + 0.3333333;
    let square = r * r;
    return p * r * square + n * -2.1219444e-4 - 0.5 * square + r + n * 0.6933594;
}

fn sigmoid(x: f32) -> f32 { return 1.0 / (1.0 + exponential(-x)); }

// By the polynomial of Cephes (tanhf) near 0, where the exponential would lose digits.
fn hyperbolic_tangent(x: f32) -> f32 {
    let square = x * x;
    var p = -5.7049887e-3;
    p = p * square + 2.0639089e-2;
    p = p * square - 5.3739716e-2;
    p = p * square + 1.3331442e-1;
    p = p * square - 3.3333282e-1;
    let size = 1.0 - 2.0 / (exponential(2.0 * abs(x)) + 1.0);
    return select(select(size, -size, x < 0.0), x + x * square * p, abs(x) < 0.625);
}

// As on the CPU (Numerical Recipes, section 6.2).
fn erfc(x: f32) -> f32 {
    let t = 1.0 / (1.0 + 0.5 * abs(x));
    var p = 0.17087277;
    p = p * t - 0.82215223;
    p = p * t + 1.4885159;
    p = p * t - 1.135204;
    p = p * t + 0.27886808;
    p = p * t - 0.18628806;
    p = p * t + 0.09678418;
    p = p * t + 0.37409196;
    p = p * t + 1.0000237;
    p = p * t - 1.2655122;
    let tail = t * exponential(p - x * x);
    return select(tail, 2.0 - tail, x < 0.0);
}

// As `Activation` is numbered.
const GELU_TANH: u32 = 1u;
const GELU_ERF: u32 = 2u;
const QUICK_GELU: u32 = 3u;
const SILU: u32 = 4u;
const TANH: u32 = 5u;

// Hendrycks and Gimpel, arXiv 1606.08415, section 2: sqrt(2 / pi), the cubic term, x * sigmoid(1.702 x).
const GELU_SCALE: f32 = 0.7978846;
const GELU_CUBIC: f32 = 0.044715;
const QUICK: f32 = 1.702;
const INVERSE_SQRT_2: f32 = 0.70710678;
const INVERSE_SQRT_2_PI: f32 = 0.3989423;

fn activation(kind: u32, x: f32) -> f32 {
    switch kind {
        case GELU_TANH: { return x * sigmoid(2.0 * GELU_SCALE * (x + GELU_CUBIC * x * x * x)); }
        case GELU_ERF: { return 0.5 * x * erfc(-x * INVERSE_SQRT_2); }
        case QUICK_GELU: { return x * sigmoid(QUICK * x); }
        case SILU: { return x * sigmoid(x); }
        case TANH: { return hyperbolic_tangent(x); }
        default: { return x; }
    }
}

// The derivative of x * sigmoid(z) where dz is that of z.
fn gate_slope(x: f32, z: f32, dz: f32) -> f32 {
    let s = sigmoid(z);
    return s + x * s * (1.0 - s) * dz;
}

fn activation_slope(kind: u32, x: f32) -> f32 {
    switch kind {
        case GELU_TANH: {
            return gate_slope(x, 2.0 * GELU_SCALE * (x + GELU_CUBIC * x * x * x),
                              2.0 * GELU_SCALE * (1.0 + 3.0 * GELU_CUBIC * x * x));
        }
        case GELU_ERF: {
            return 0.5 * erfc(-x * INVERSE_SQRT_2)
                + x * INVERSE_SQRT_2_PI * exponential(-0.5 * x * x);
        }
        case QUICK_GELU: { return gate_slope(x, QUICK * x, QUICK); }
        case SILU: { return gate_slope(x, x, 1.0); }
        case TANH: {
            let y = hyperbolic_tangent(x);
            return 1.0 - y * y;
        }
        default: { return 1.0; }
    }
}

// The upper and the lower word of a * b.
fn mul_wide(a: u32, b: u32) -> vec2<u32> {
    let low = (a & 0xffffu) * (b & 0xffffu);
    let cross = (a >> 16u) * (b & 0xffffu) + (low >> 16u);
    let other = (a & 0xffffu) * (b >> 16u) + (cross & 0xffffu);
    return vec2<u32>((a >> 16u) * (b >> 16u) + (cross >> 16u) + (other >> 16u), a * b);
}

// An index in a random sequence. Words are (low, high).
struct RandomSequence { seed: vec2<u32>, number: vec2<u32>, first: vec2<u32> }

// Philox4x32-10, as in `random.rs`: the word at `index` after the first of the sequence.
fn random_word(stream: RandomSequence, index: u32) -> u32 {
    let low = stream.first.x + index;
    let high = stream.first.y + select(0u, 1u, low < index);
    var key = stream.seed;
    var c = vec4<u32>((low >> 2u) | (high << 30u), high >> 2u, stream.number);
    for (var round = 0u; round < 10u; round++) {
        let a = mul_wide(0xD2511F53u, c.x);
        let b = mul_wide(0xCD9E8D57u, c.z);
        c = vec4<u32>(b.x ^ c.y ^ key.x, b.y, a.x ^ c.w ^ key.y, a.y);
        key += vec2<u32>(0x9E3779B9u, 0xBB67AE85u);
    }
    return c[low & 3u];
}

// Uniform over (0, 1), both excluded.
fn random_uniform(stream: RandomSequence, index: u32) -> f32 {
    return (f32(random_word(stream, index) >> 9u) + 0.5) * (1.0 / 8388608.0);
}

// Of the standard normal distribution, by Box and Muller as in `RandomSequence::normal` but in f32: the radius by
// our own logarithm, the angle by its eighth of the circle. The number at an index is the cosine or the sine of a
// pair that begins at an even index of the sequence.
fn random_normal(stream: RandomSequence, index: u32) -> f32 {
    let is_odd = ((stream.first.x + index) & 1u) == 1u;
    // One back from an odd place; `index` may be 0 then, and the sum wraps as it should.
    let pair = index - select(0u, 1u, is_odd);
    let before = RandomSequence(stream.seed, stream.number, stream.first - vec2<u32>(0u, select(0u, 1u, pair == NONE)));
    let radius = sqrt(-2.0 * logarithm(random_uniform(before, pair)));
    return radius * turn(random_uniform(stream, pair + 1u), is_odd);
}

// The cosine or the sine of a share of the circle, by the polynomials of Cephes (sinf, cosf).
fn turn(share: f32, is_sine: bool) -> f32 {
    let quarter = round(share * 4.0);
    // Exact: both are multiples of 2^-24 and the difference is small.
    let angle = (share - 0.25 * quarter) * 6.2831853;
    let square = angle * angle;
    let sine = angle + angle * square
        * (-1.6666654e-1 + square * (8.3321609e-3 + square * -1.9515296e-4));
    let cosine = 1.0 - 0.5 * square
        + square * square * (4.1666646e-2 + square * (-1.3887316e-3 + square * 2.4433157e-5));
    let which = u32(quarter) + select(1u, 0u, is_sine);
    let value = select(sine, cosine, (which & 1u) == 1u);
    return select(value, -value, (which & 2u) == 2u);
}
