// Prodigy: moments and two sums over all parameters, the next d, and the parameters. `estimates` are d, n, the size of s,
// and d before the last step. As everywhere, a norm of all gradients that is not finite makes the step change nothing.

// A workgroup for every `share` elements writes the sums of g * (start - p) and of |s|.
kernel prodigy_moments(params: [f32], gradients: [f32], first: mut [f32], second: mut [f32], start: [f32],
                       sums: mut [f32], partial: mut [f32], estimates: [f32], norm: [f32], n: u32, share: u32,
                       place: u32, most: f32, scale: f32, keeps: f32, news: f32, square_keeps: f32, squares: f32,
                       sum_keeps: f32, sum_rate: f32, d0: f32) {
    var scale = p.scale;
    var is_defined = true;
    if has_norm() {
        let size = scale * norm(0u);
        is_defined = is_finite(size);
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    let d = estimates(0u);
    let along = d / p.d0 * d * p.sum_rate;
    var dot = 0.0;
    var total = 0.0;
    if is_defined {
        for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
            let g = scale * gradients(i);
            let sum = sums(i) * p.sum_keeps + g * along;
            set_first(i, first(i) * p.keeps + g * (p.news * d));
            set_second(i, second(i) * p.square_keeps + g * g * (p.squares * d * d));
            set_sums(i, sum);
            dot += g * (start(i) - params(i));
            total += abs(sum);
        }
    }
    dot = group_sum(lane, dot);
    total = group_sum(lane, total);
    if lane == 0u { set_partial_pair(2u * (p.place + group), vec2<f32>(dot, total), true); }
}

// One workgroup: the next d.
kernel prodigy_distance(partial: [f32], estimates: mut [f32], norm: [f32], n: u32, scale: f32, sum_keeps: f32,
                        rate: f32, d0: f32, coefficient: f32) {
    var dot = 0.0;
    var total = 0.0;
    for (var i = lane; i < p.n; i += THREADS) {
        dot += partial(2u * i);
        total += partial(2u * i + 1u);
    }
    dot = group_sum(lane, dot);
    total = group_sum(lane, total);
    if lane != 0u { return; }
    if has_norm() && !is_finite(p.scale * norm(0u)) { return; }
    let d = estimates(0u);
    set_estimates(2u, total);
    set_estimates(3u, d);
    if total == 0.0 { return; }
    let numerator = p.sum_keeps * estimates(1u) + d / p.d0 * d * p.rate * dot;
    set_estimates(1u, numerator);
    set_estimates(0u, max(d, p.coefficient * numerator / total));
}

// A thread for each element.
kernel prodigy_params(params: mut [f32], first: [f32], second: [f32], estimates: [f32], norm: [f32], n: u32,
                      scale: f32, rate: f32, decay: f32, epsilon: f32) {
    if thread >= p.n { return; }
    if has_norm() && !is_finite(p.scale * norm(0u)) { return; }
    if estimates(2u) == 0.0 { return; }
    let length = estimates(3u) * p.rate;
    let step = first(thread) / (sqrt(second(thread)) + estimates(0u) * p.epsilon);
    set_params(thread, params(thread) - (params(thread) * (length * p.decay) + length * step));
}
