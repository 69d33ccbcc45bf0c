// Enlarging images, a thread for every two pixels of the result.

kernel upsample(x: [X], y: mut [X], n: u32, wide: u32, factor: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let row = at / p.wide / p.factor;
    return x(row * (p.wide / p.factor) + at % p.wide / p.factor);
}
