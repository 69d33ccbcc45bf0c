// Steps, norms and averages of parameters, all f32 but for what is said to be X.

// A sum of squares is unit * unit * sum, where the unit is the power of two below the largest of the numbers: f32 can
// hold the squares of what is divided by it, and nothing is rounded. What is not finite has a unit that is not.
// Two numbers for each share, in this order.
struct Squares { unit: f32, sum: f32 }

fn square_of(x: f32) -> Squares {
    let unit = bitcast<f32>(bitcast<u32>(x) & 0x7f800000u);
    if unit == 0.0 { return Squares(); }
    return Squares(unit, x / unit * (x / unit));
}

fn together(a: Squares, b: Squares) -> Squares {
    let unit = larger(a.unit, b.unit);
    if unit == 0.0 { return a; }
    let of_a = a.unit / unit;
    let of_b = b.unit / unit;
    return Squares(unit, a.sum * of_a * of_a + b.sum * of_b * of_b);
}

// What the threads of a workgroup have together.
fn group_squares(lane: u32, all: Squares) -> Squares {
    let unit = group_max(lane, all.unit);
    var own = 0.0;
    if unit > 0.0 { own = all.unit / unit; }
    return Squares(unit, group_sum(lane, all.sum * own * own));
}

// A thread for each element.
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

// A thread for each element.
kernel lion(params: mut [f32], gradients: [f32], means: mut [f32], norm: [f32], n: u32, most: f32, scale: f32,
            shrinks: f32, keeps: f32, news: f32, mean_keeps: f32, mean_news: f32, rate: f32) {
    if thread >= p.n { return; }
    var scale = p.scale;
    if has_norm() {
        let length = scale * norm(0u);
        if !is_finite(length) { return; }
        scale *= min(1.0, p.most / (length + 1e-6));
    }
    let g = scale * gradients(thread);
    let along = means(thread) * p.keeps + g * p.news;
    // What is not finite stays visible.
    let step = select(along, sign(along), is_finite(along));
    set_params(thread, params(thread) - (params(thread) * p.shrinks + p.rate * step));
    set_means(thread, means(thread) * p.mean_keeps + g * p.mean_news);
}

// A thread for each element.
kernel schedule_free(params: mut [f32], gradients: [f32], z: mut [f32], second: mut [f32], norm: [f32], n: u32,
                     most: f32, scale: f32, keeps: f32, squares: f32, correction: f32, epsilon: f32, decay: f32,
                     weight: f32, y_rate: f32, rate: f32) {
    if thread >= p.n { return; }
    var scale = p.scale;
    if has_norm() {
        let length = scale * norm(0u);
        if !is_finite(length) { return; }
        scale *= min(1.0, p.most / (length + 1e-6));
    }
    let g = scale * gradients(thread);
    let square = second(thread) * p.keeps + g * g * p.squares;
    let y = params(thread);
    let along = g / (sqrt(square) * p.correction + p.epsilon) + p.decay * y;
    set_second(thread, square);
    set_params(thread, y + (z(thread) - y) * p.weight - p.y_rate * along);
    set_z(thread, z(thread) - p.rate * along);
}

// A workgroup for every `share` elements.
kernel squares(gradient: [f32], partial: mut [f32], n: u32, share: u32, place: u32) {
    var all = Squares();
    for (var i = group * p.share + lane; i < min((group + 1u) * p.share, p.n); i += THREADS) {
        all = together(all, square_of(gradient(i)));
    }
    all = group_squares(lane, all);
    if lane == 0u { set_partial_pair(2u * (p.place + group), vec2<f32>(all.unit, all.sum), true); }
}

// One workgroup.
kernel root(partial: [f32], norm: mut [f32], n: u32) {
    var all = Squares();
    for (var i = lane; i < p.n; i += THREADS) {
        all = together(all, Squares(partial(2u * i), partial(2u * i + 1u)));
    }
    all = group_squares(lane, all);
    if lane == 0u { set_norm(0u, select(all.unit, all.unit * sqrt(all.sum), is_finite(all.unit))); }
}

// A thread for each element; counts may be added in any order.
kernel count_not_finite(numbers: [X], count: mut [u32], n: u32) {
    if thread < p.n && !is_finite(numbers(thread)) { add_count(0u, 1u); }
}

kernel ema(average: mut [f32], value: [X], n: u32, decay: f32) {
    if thread >= p.n { return; }
    set_average(thread, p.decay * average(thread) + (1.0 - p.decay) * value(thread));
}

// A thread for every two elements. Up or down at random, by the carry of what is cut off plus a random number of as
// many bits.
kernel stochastic_round(values: [f32], rounded: mut [X], n: u32, seed_low: u32, seed_high: u32, number_low: u32,
                        number_high: u32, first_low: u32, first_high: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let both = at + 1u < p.n;
    let next = select(at, at + 1u, both);
    set_rounded_pair(at, vec2<f32>(up_or_down(values(at), at), up_or_down(values(next), next)), both);
}

// A number that bf16 can hold.
fn up_or_down(value: f32, at: u32) -> f32 {
    if !is_finite(value) { return value; }
    let stream = RandomSequence(vec2<u32>(p.seed_low, p.seed_high), vec2<u32>(p.number_low, p.number_high),
                        vec2<u32>(p.first_low, p.first_high));
    return bitcast<f32>((bitcast<u32>(value) + (random_word(stream, at) & 0xffffu)) & 0xffff0000u);
}
