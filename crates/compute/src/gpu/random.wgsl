// Normal random numbers by Box and Muller, a thread for every two, as `Stream::normal` finds them but in
// f32: the radius by our own logarithm, the angle by its eighth of the circle.

kernel normal(tensor: mut [X], n: u32, deviation: f32, seed_low: u32, seed_high: u32, number_low: u32,
              number_high: u32, first_low: u32, first_high: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let stream = Stream(vec2<u32>(p.seed_low, p.seed_high), vec2<u32>(p.number_low, p.number_high),
                        vec2<u32>(p.first_low, p.first_high));
    let numbers = vec2<f32>(normal_at(stream, at), normal_at(stream, at + 1u));
    set_tensor_pair(at, p.deviation * numbers, at + 1u < p.n);
}

// The number at an index is the cosine or the sine of a pair that begins at an even place of the stream.
fn normal_at(stream: Stream, index: u32) -> f32 {
    let is_odd = ((stream.first.x + index) & 1u) == 1u;
    // One back from an odd place; `index` may be 0 then, and the sum wraps as it should.
    let pair = index - select(0u, 1u, is_odd);
    let before = Stream(stream.seed, stream.number, stream.first - vec2<u32>(0u, select(0u, 1u, pair == NONE)));
    let radius = sqrt(-2.0 * logarithm(random_uniform(before, pair)));
    return radius * turn(random_uniform(stream, pair + 1u), is_odd);
}

// The cosine or the sine of a share of the circle, by the polynomials of Cephes (sinf, cosf).
fn turn(share: f32, is_sine: bool) -> f32 {
    let quarter = round(share * 4.0);
    // Exact: both are multiples of 2^-24 and the difference is small.
    let angle = (share - 0.25 * quarter) * 6.2831853;
    let square = angle * angle;
    let sine = angle + angle * square
        * (-1.6666654e-1 + square * (8.3321609e-3 + square * -1.9515296e-4));
    let cosine = 1.0 - 0.5 * square
        + square * square * (4.1666646e-2 + square * (-1.3887316e-3 + square * 2.4433157e-5));
    let which = u32(quarter) + select(1u, 0u, is_sine);
    let value = select(sine, cosine, (which & 1u) == 1u);
    return select(value, -value, (which & 2u) == 2u);
}
