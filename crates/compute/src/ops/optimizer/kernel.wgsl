// Steps, norms and averages of parameters, all f32 but for what is said to be X.

// A thread for each number.
kernel adamw(params: mut [f32], gradients: [f32], first: mut [f32], second: mut [f32], norm: [f32],
             n: u32, most: f32, scale: f32, remains: f32, news: f32, keeps: f32, squares: f32,
             correction: f32, epsilon: f32, rate: f32) {
    if thread >= p.n { return; }
    var scale = p.scale;
    // The norm is read where it was found; one that is not finite makes the step change nothing.
    if has_norm() {
        let length = scale * norm(0u);
        if !is_finite(length) { return; }
        scale *= min(1.0, p.most / (length + 1e-6));
    }
    let g = scale * gradients(thread);
    let mean = first(thread) + (g - first(thread)) * p.news;
    let square = second(thread) * p.keeps + g * g * p.squares;
    set_first(thread, mean);
    set_second(thread, square);
    let step = mean / (sqrt(square) * p.correction + p.epsilon);
    set_params(thread, params(thread) * p.remains - p.rate * step);
}

// A group for every `share` numbers writes their largest size, or the sum of their squares.
kernel sizes(gradient: [f32], partial: mut [f32], n: u32, share: u32, place: u32) {
    var most = 0.0;
    for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
        most = larger(abs(gradient(i)), most);
    }
    most = group_max(lane, most);
    if lane == 0u { set_partial(p.place + group, most); }
}

// The largest of all; one group. What is divided by it has squares that f32 can hold.
kernel largest(partial: mut [f32], n: u32) {
    var most = 0.0;
    for (var i = lane; i < p.n; i += THREADS) { most = larger(partial(i), most); }
    most = group_max(lane, most);
    if lane == 0u { set_partial(p.n, most); }
}

kernel squares(gradient: [f32], partial: mut [f32], n: u32, share: u32, place: u32, largest_place: u32) {
    let most = partial(p.largest_place);
    var inverse = 0.0;
    if most > 0.0 { inverse = 1.0 / most; }
    var sum = 0.0;
    for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
        let x = gradient(i) * inverse;
        sum += x * x;
    }
    sum = group_sum(lane, sum);
    if lane == 0u { set_partial(p.place + group, sum); }
}

// One group.
kernel root(partial: [f32], norm: mut [f32], n: u32) {
    var sum = 0.0;
    for (var i = lane; i < p.n; i += THREADS) { sum += partial(i); }
    sum = group_sum(lane, sum);
    let most = partial(p.n);
    // The largest says so if anything is not finite.
    if lane == 0u { set_norm(0u, select(most, most * sqrt(sum), is_finite(most))); }
}

// A thread for each number; counts may be added in any order.
kernel count_not_finite(numbers: [X], count: mut [u32], n: u32) {
    if thread < p.n && !is_finite(numbers(thread)) { add_count(0u, 1u); }
}

kernel ema(average: mut [f32], value: [X], n: u32, decay: f32) {
    if thread >= p.n { return; }
    set_average(thread, p.decay * average(thread) + (1.0 - p.decay) * value(thread));
}
