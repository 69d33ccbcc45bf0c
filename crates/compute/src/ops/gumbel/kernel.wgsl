// Random choices, a workgroup for each row. They are made from numbers in f32, before rounding to a narrow
// dtype could make two of them equal. Noise is found again for each pass: it is a function of its place.

// Half a step of the random numbers below 1: what is nearer counts as this far.
const NEAREST_TO_ONE: f32 = 1.0 / 33554432.0;

// Soft choices, and the hard ones that belong to them: either may be left out. Without logits they lie where
// the first of the two is written, since each thread writes the numbers that it read.
kernel gumbel(logits: [X], soft: mut [X], hard: mut [X], width: u32, temperature: f32, mirrored: u32,
              seed_low: u32, seed_high: u32, number_low: u32, number_high: u32, first_low: u32, first_high: u32) {
    let start = group * p.width;
    // The largest of a thread's own, and its place counted from the end, so that the largest count is the first.
    var best = LOWEST;
    var count = 0u;
    for (var i = lane; i < p.width; i += THREADS) {
        let x = score(start + i);
        if is_nan(x) || (x > best && !is_nan(best)) {
            best = x;
            count = p.width - i;
        }
    }
    let most = group_max(lane, best);
    let chosen = u32(group_max(lane, select(0.0, f32(count), best == most)));
    var sum = 0.0;
    for (var i = lane; i < p.width; i += THREADS) { sum += weight(start + i, most, chosen + i == p.width); }
    let inverse = 1.0 / group_sum(lane, sum);
    let is_defined = is_finite(most) && chosen > 0u;
    for (var i = 2u * lane; i < p.width; i += 2u * THREADS) {
        let both = i + 1u < p.width;
        let is_one = vec2<bool>(chosen + i == p.width, chosen + i + 1u == p.width);
        let next = select(i, i + 1u, both);
        let weights = vec2<f32>(weight(start + i, most, is_one.x), weight(start + next, most, is_one.y));
        if has_soft() { set_soft_pair(start + i, inverse * weights, both); }
        let choice = select(vec2<f32>(0.0), vec2<f32>(1.0), is_one);
        if has_hard() { set_hard_pair(start + i, select(vec2<f32>(not_a_number()), choice, is_defined), both); }
    }
}

// Relative to that of the chosen one, which is known: found again, a score may differ in its last bits,
// and temperatures may be tiny.
fn weight(at: u32, most: f32, is_chosen: bool) -> f32 {
    if !is_finite(most) { return not_a_number(); }
    let far = (score(at) - most) / p.temperature;
    return exponential(select(far, 0.0, is_chosen || far > 0.0));
}

fn score(at: u32) -> f32 {
    let stream = RandomSequence(vec2<u32>(p.seed_low, p.seed_high), vec2<u32>(p.number_low, p.number_high),
                        vec2<u32>(p.first_low, p.first_high));
    var logit = 0.0;
    if has_logits() { logit = logits(at); }
    else if has_soft() { logit = soft(at); }
    else { logit = hard(at); }
    let u = random_uniform(stream, at);
    let wait = max(-logarithm(select(u, 1.0 - u, p.mirrored != 0u)), NEAREST_TO_ONE);
    return logit - logarithm(wait);
}

// dlogits = soft * (gradient - sum of gradient * soft) / temperature, in place. Twice: the first mean is
// off by as much as rounding moved the sum of a row from 1.
kernel gumbel_backward(soft: [X], gradient: mut [X], width: u32, temperature: f32) {
    let start = group * p.width;
    var mean = 0.0;
    for (var time = 0u; time < 2u; time++) {
        var sum = 0.0;
        for (var i = lane; i < p.width; i += THREADS) {
            sum += (gradient(start + i) - mean) * soft(start + i);
        }
        mean += group_sum(lane, sum);
    }
    for (var i = 2u * lane; i < p.width; i += 2u * THREADS) {
        let g = soft_pair(start + i) * (gradient_pair(start + i) - mean) / p.temperature;
        set_gradient_pair(start + i, g, i + 1u < p.width);
    }
}
