// Group norm: a group of threads finds the statistics of a group of channels, then a thread for every two
// numbers applies them.

// Mean and 1 / std. Distances are taken from the first number at first, which is near the others where
// the mean is large.
kernel group_statistics(x: [X], statistics: mut [f32], size: u32, epsilon: f32) {
    let start = group * p.size;
    let center = x(start);
    var sum = 0.0;
    for (var i = lane; i < p.size; i += THREADS) { sum += x(start + i) - center; }
    let mean = center + group_sum(lane, sum) / f32(p.size);
    var squares = 0.0;
    for (var i = lane; i < p.size; i += THREADS) {
        let distance = x(start + i) - mean;
        squares += distance * distance;
    }
    let variance = group_sum(lane, squares) / f32(p.size);
    if lane != 0u { return; }
    set_statistics(2u * group, mean);
    set_statistics(2u * group + 1u, 1.0 / sqrt(variance + p.epsilon));
}

kernel group_norm(x: [X], statistics: [f32], weight: [f32], bias: [f32], y: mut [X], n: u32, size: u32,
                  plane: u32, channels: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let of_group = at / p.size;
    let channel = at / p.plane % p.channels;
    let factor = statistics(2u * of_group + 1u) * weight(channel);
    return activation(p.kind, (x(at) - statistics(2u * of_group)) * factor + bias(channel));
}
