// Muon: from a gradient to a direction, and the update along it. The matmuls between the two are ordinary
// ones. As everywhere, a norm of all gradients that is not finite makes the step change nothing.

// A workgroup for every `share` elements updates the mean and writes the sum of the squares of the direction.
kernel update_momentum(gradient: [f32], mean: mut [f32], partial: mut [f32], norm: [f32], n: u32, share: u32,
                 most: f32, scale: f32, momentum: f32) {
    var scale = p.scale;
    var is_defined = true;
    if has_norm() {
        let size = scale * norm(0u);
        is_defined = is_finite(size);
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    var sum = 0.0;
    for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
        let g = scale * gradient(i);
        let now = mean(i) + (g - mean(i)) * (1.0 - p.momentum);
        if is_defined { set_mean(i, now); }
        let x = g + (now - g) * p.momentum;
        sum += x * x;
    }
    sum = group_sum(lane, sum);
    if lane == 0u { set_partial(group, sum); }
}

// The root of all sums, behind them; one workgroup.
kernel root_of_all(partial: mut [f32], n: u32) {
    var sum = 0.0;
    for (var i = lane; i < p.n; i += THREADS) { sum += partial(i); }
    sum = group_sum(lane, sum);
    if lane == 0u { set_partial(p.n, sqrt(sum)); }
}

// A thread for every two elements: the direction, of length 1.
kernel direction(gradient: [f32], mean: [f32], partial: [f32], along: mut [X], norm: [f32], n: u32,
                 place: u32, least: f32, most: f32, scale: f32, momentum: f32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    var scale = p.scale;
    if has_norm() {
        let size = scale * norm(0u);
        if !is_finite(size) { return; }
        scale *= min(1.0, p.most / (size + 1e-6));
    }
    let g = scale * gradient_pair(at);
    let inverse = 1.0 / larger(partial(p.place), p.least);
    set_along_pair(at, (g + (mean_pair(at) - g) * p.momentum) * inverse, at + 1u < p.n);
}

// A thread for each element.
kernel apply_update(params: mut [f32], along: [X], norm: [f32], n: u32, scale: f32, remains: f32, rate: f32) {
    if thread >= p.n { return; }
    if has_norm() && !is_finite(p.scale * norm(0u)) { return; }
    set_params(thread, params(thread) * p.remains - p.rate * along(thread));
}
