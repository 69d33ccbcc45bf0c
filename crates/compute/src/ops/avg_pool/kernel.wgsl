// Means over squares, a thread for every two pixels of the result. Rows of all planes follow each other,
// and the squares divide them: so a row of the result starts at `size` times its number.

kernel avg_pool(x: [X], y: mut [X], n: u32, narrow: u32, size: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let width = p.narrow * p.size;
    let corner = at / p.narrow * p.size * width + at % p.narrow * p.size;
    var sum = 0.0;
    for (var i = 0u; i < p.size; i++) {
        for (var j = 0u; j < p.size; j++) { sum += x(corner + i * width + j); }
    }
    return sum / f32(p.size * p.size);
}
