// Layer norm and, where rows are not CENTERED, root-mean-square norm; PER_ROW threads for each row. The row is read
// again for each pass over it: it is in the cache by then. Vectors are of dtype Y, and lie within rows of several.

const STEP: u32 = 8u * PER_ROW;

struct Moments { mean: f32, inverse: f32 }

fn moments(lane: u32, first: u32, end: u32) -> Moments {
    let place = 8u * (lane % PER_ROW);
    var mean = 0.0;
    if CENTERED == 1u {
        var sum = 0.0;
        for (var i = place; i < end; i += STEP) { sum += sum_of_eight(x_eight(first + i, end - i)); }
        mean = row_sum(lane, sum) / f32(p.width);
    }
    var squares = 0.0;
    for (var i = place; i < end; i += STEP) {
        let distance = only(less(x_eight(first + i, end - i), mean), end - i);
        squares += sum_of_eight(multiplied(distance, distance));
    }
    return Moments(mean, 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon));
}

// Eight numbers of a row, brought to mean 0 and variance 1.
fn normalised(at: u32, n: u32, m: Moments) -> Eight { return times(m.inverse, less(x_eight(at, n), m.mean)); }

// What a row is multiplied by.
fn factors(vector: u32, i: u32) -> Eight {
    if !has_scale() { return Eight(vec4<f32>(1.0), vec4<f32>(1.0)); }
    return less(scale_eight(vector * p.scale_width + p.scale_first + i, p.width - i), -f32(p.plus_one));
}

kernel layer_norm(x: [X by WIDE], scale: [Y by WIDE], shift: [Y by WIDE], y: mut [X by WIDE], rows: u32,
                  width: u32, rows_per_vector: u32, scale_width: u32, scale_first: u32, shift_width: u32,
                  shift_first: u32, epsilon: f32, plus_one: u32) {
    let row = thread / PER_ROW;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let m = moments(lane, first, end);
    let vector = row / p.rows_per_vector;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let n = end - i;
        var value = multiplied(normalised(first + i, n, m), factors(vector, i));
        if has_shift() { value = plus(value, shift_eight(vector * p.shift_width + p.shift_first + i, n)); }
        set_y_eight(first + i, value, n);
    }
}

// A workgroup goes through a share of the rows that have a vector in common, some at a time. When their gradients are
// found, threads take columns instead, for the sums that the gradients of vectors are: those of a share, which
// another kernel adds up. What is not wanted is not given.
kernel layer_norm_backward(x: [X by WIDE], scale: [Y by WIDE], gradient: [X by WIDE], result: mut [Z by WIDE],
                           scale_sums: mut [f32 by WIDE], shift_sums: mut [f32 by WIDE], width: u32,
                           rows_per_vector: u32, share: u32, scale_width: u32, scale_first: u32, epsilon: f32,
                           plus_one: u32, add: u32) {
    let shares = (p.rows_per_vector + p.share - 1u) / p.share;
    let vector = group / shares;
    let first = vector * p.rows_per_vector + group % shares * p.share;
    let last = min(first + p.share, (vector + 1u) * p.rows_per_vector);
    var sums = array<Sums, HELD>();
    for (var row = first; row < last; row += AT_ONCE) {
        let own = row + lane / PER_ROW;
        let end = select(0u, p.width, own < last);
        let m = moments(lane, own * p.width, end);
        if has_result() { find_for_row(lane, vector, own * p.width, end, m); }
        if !has_scale_sums() && !has_shift_sums() { continue; }
        if lane % PER_ROW == 0u { moments_now[lane / PER_ROW] = m; }
        workgroupBarrier();
        let now = min(row + AT_ONCE, last);
        for (var k = 0u; k < HELD; k++) { sums[k] = with_rows(sums[k], 8u * (k * THREADS + lane), row, now); }
        workgroupBarrier();
    }
    for (var k = 0u; k < HELD; k++) {
        let i = 8u * (k * THREADS + lane);
        if i >= p.width { break; }
        if has_scale_sums() { set_scale_sums_eight(group * p.width + i, sums[k].scale, p.width - i); }
        if has_shift_sums() { set_shift_sums_eight(group * p.width + i, sums[k].shift, p.width - i); }
    }
}

const AT_ONCE: u32 = THREADS / PER_ROW;

var<workgroup> moments_now: array<Moments, AT_ONCE>;

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
fn find_for_row(lane: u32, vector: u32, first: u32, end: u32, m: Moments) {
    var sum = 0.0;
    var along = 0.0;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = only(multiplied(gradient_eight(first + i, end - i), factors(vector, i)), end - i);
        sum += sum_of_eight(g);
        along += sum_of_eight(multiplied(g, normalised(first + i, end - i, m)));
    }
    var g_mean = 0.0;
    if CENTERED == 1u { g_mean = row_sum(lane, sum) / f32(p.width); }
    let slope = row_sum(lane, along) / f32(p.width);
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = multiplied(gradient_eight(first + i, end - i), factors(vector, i));
        let value = times(m.inverse, plus(less(g, g_mean), times(-slope, normalised(first + i, end - i, m))));
        put_result_eight(first + i, value, end - i, p.add);
    }
}

// Sums of eight columns.
struct Sums { scale: Eight, shift: Eight }

// With some rows more, whose moments are known.
fn with_rows(before: Sums, i: u32, row: u32, end: u32) -> Sums {
    var sums = before;
    if i >= p.width { return sums; }
    for (var j = row; j < end; j++) {
        let at = j * p.width + i;
        let g = gradient_eight(at, p.width - i);
        if has_scale_sums() {
            sums.scale = plus(sums.scale, multiplied(g, normalised(at, p.width - i, moments_now[j - row])));
        }
        sums.shift = plus(sums.shift, g);
    }
    return sums;
}
