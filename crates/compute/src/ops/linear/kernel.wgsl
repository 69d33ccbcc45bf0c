// Dropout: zeros a share of the elements and scales the others up, a thread for every two.

kernel dropout(x: [X], seen: mut [X], n: u32, share: f32, scale: f32, seed_low: u32, seed_high: u32,
                number_low: u32, number_high: u32, first_low: u32, first_high: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let stream = RandomSequence(vec2<u32>(p.seed_low, p.seed_high), vec2<u32>(p.number_low, p.number_high),
                        vec2<u32>(p.first_low, p.first_high));
    let random = vec2<f32>(random_uniform(stream, at), random_uniform(stream, at + 1u));
    let factors = select(vec2<f32>(p.scale), vec2<f32>(0.0), random < vec2<f32>(p.share));
    set_seen_pair(at, factors * x_pair(at), at + 1u < p.n);
}
