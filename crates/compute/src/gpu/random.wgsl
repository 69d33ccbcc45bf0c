// Normal random numbers, a thread for every two.

kernel normal(tensor: mut [X], n: u32, deviation: f32, seed_low: u32, seed_high: u32, number_low: u32,
              number_high: u32, first_low: u32, first_high: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let stream = RandomSequence(vec2<u32>(p.seed_low, p.seed_high), vec2<u32>(p.number_low, p.number_high),
                        vec2<u32>(p.first_low, p.first_high));
    let numbers = vec2<f32>(random_normal(stream, at), random_normal(stream, at + 1u));
    set_tensor_pair(at, p.deviation * numbers, at + 1u < p.n);
}
