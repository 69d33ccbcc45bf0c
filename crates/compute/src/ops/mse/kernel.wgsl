// The mean squared error. Threads of a workgroup share the numbers of some rows, and add up what they found.

// A workgroup for every `share` rows writes their sum.
kernel mse_rows(prediction: [X], goal: [Y], weights: [f32], mask: [f32], elements: [f32],
                partial: mut [f32], rows: u32, width: u32, rows_per_sample: u32, share: u32) {
    var total = 0.0;
    for (var row = group * p.share; row < min((group + 1u) * p.share, p.rows); row++) {
        var squares = 0.0;
        for (var i = lane; i < p.width; i += THREADS) {
            let error = prediction(row * p.width + i) - goal(row * p.width + i);
            if has_elements() { squares += elements(row * p.width + i) * error * error; }
            else { squares += error * error; }
        }
        total += factor(row) * squares;
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

// 2 * gradient * (prediction - goal) * factor / count, a thread for every two elements.
kernel mse_backward(prediction: [X], goal: [Y], weights: [f32], mask: [f32], elements: [f32],
                    gradient: [f32], inverse: [f32], result: mut [X], n: u32, width: u32, rows_per_sample: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    var factors = vec2<f32>(factor(at / p.width), factor((at + 1u) / p.width));
    if has_elements() { factors *= vec2<f32>(elements(at), elements(min(at + 1u, p.n - 1u))); }
    let error = prediction_pair(at) - goal_pair(at);
    let scale = 2.0 * gradient(0u) * inverse(0u);
    put_result_pair(at, error * (scale * factors), at + 1u < p.n, p.add);
}

fn factor(row: u32) -> f32 {
    var x = 1.0;
    if has_weights() { x = weights(row / p.rows_per_sample); }
    if has_mask() { x *= mask(row); }
    return x;
}
