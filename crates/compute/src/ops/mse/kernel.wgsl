// The mean cost of errors. Threads of a workgroup share the numbers of some rows, and add up what they found.

// What an error costs; kinds are those of CostKind in mod.rs.
fn cost(kind: u32, d: f32, c: f32) -> f32 {
    if kind == 1u { return abs(d); }
    if kind == 2u { return select(c * (abs(d) - 0.5 * c), 0.5 * d * d, abs(d) <= c); }
    // 2c(sqrt(d^2 + c^2) - c) without the difference of two near numbers.
    if kind == 3u { return 2.0 * c * d * (d / (sqrt(d * d + c * c) + c)); }
    return d * d;
}

// Its derivative. NaN stays NaN.
fn slope(kind: u32, d: f32, c: f32) -> f32 {
    if kind == 1u { return select(select(d, -1.0, d < 0.0), 1.0, d > 0.0); }
    if kind == 2u { return select(select(d, -c, d < -c), c, d > c); }
    if kind == 3u { return 2.0 * c * d / sqrt(d * d + c * c); }
    return 2.0 * d;
}

// A workgroup for every `share` rows writes their sum.
kernel mse_rows(prediction: [X], goal: [Y], weights: [f32], mask: [f32], elements: [f32],
                thresholds: [f32], partial: mut [f32], rows: u32, width: u32, rows_per_sample: u32, share: u32,
                kind: u32) {
    var total = 0.0;
    for (var row = group * p.share; row < min((group + 1u) * p.share, p.rows); row++) {
        let c = threshold(row);
        var costs = 0.0;
        for (var i = lane; i < p.width; i += THREADS) {
            let error = prediction(row * p.width + i) - goal(row * p.width + i);
            let own = cost(p.kind, error, c);
            if has_elements() { costs += elements(row * p.width + i) * own; } else { costs += own; }
        }
        total += factor(row) * costs;
    }
    total = group_sum(lane, total);
    if lane == 0u { set_partial(group, total); }
}

// What a row's error is multiplied by.
fn factor(row: u32) -> f32 {
    var x = 1.0;
    if has_weights() { x = weights(row / p.rows_per_sample); }
    if has_mask() { x *= mask(row); }
    return x;
}

// The threshold of a row's errors.
fn threshold(row: u32) -> f32 {
    if has_thresholds() { return thresholds(row / p.rows_per_sample); }
    return 1.0;
}

// The sum over all, divided; one workgroup. Without partial sums, one over what they are divided by.
kernel mse_finish(partial: [f32], mask: [f32], mean: mut [f32], blocks: u32, rows: u32, width: u32) {
    var total = 0.0;
    for (var i = lane; i < p.blocks; i += THREADS) { total += partial(i); }
    total = group_sum(lane, total);
    var sum = 0.0;
    if has_mask() {
        for (var row = lane; row < p.rows; row += THREADS) { sum += mask(row); }
    }
    var count = f32(p.rows);
    let masked = group_sum(lane, sum);
    if has_mask() { count = masked; }
    if lane != 0u { return; }
    if p.blocks == 0u { total = 1.0; }
    // Nothing counts: the mean of nothing is zero, unless what was to be counted is no number.
    if count == 0.0 { set_mean(0u, select(0.0, total, is_nan(total))); return; }
    set_mean(0u, total / count / f32(p.width));
}

// gradient * cost'(prediction - goal) * factor / count, a thread for every two elements.
kernel mse_backward(prediction: [X], goal: [Y], weights: [f32], mask: [f32], elements: [f32],
                    thresholds: [f32], gradient: [f32], inverse: [f32], result: mut [X], n: u32, width: u32,
                    rows_per_sample: u32, kind: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    var factors = vec2<f32>(factor(at / p.width), factor((at + 1u) / p.width));
    if has_elements() { factors *= vec2<f32>(elements(at), elements(min(at + 1u, p.n - 1u))); }
    let error = prediction_pair(at) - goal_pair(at);
    let slopes = vec2<f32>(slope(p.kind, error.x, threshold(at / p.width)),
                           slope(p.kind, error.y, threshold(min((at + 1u) / p.width, (p.n - 1u) / p.width))));
    let scale = gradient(0u) * inverse(0u);
    put_result_pair(at, slopes * (scale * factors), at + 1u < p.n, p.add);
}

fn factor(row: u32) -> f32 {
    var x = 1.0;
    if has_weights() { x = weights(row / p.rows_per_sample); }
    if has_mask() { x *= mask(row); }
    return x;
}

// The threshold of a row's errors.
fn threshold(row: u32) -> f32 {
    if has_thresholds() { return thresholds(row / p.rows_per_sample); }
    return 1.0;
}
