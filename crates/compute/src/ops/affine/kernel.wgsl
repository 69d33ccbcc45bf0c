// Channels scaled and shifted, a thread for every two elements.

kernel affine(x: [X], scale: [f32], bias: [f32], y: mut [X], n: u32, width: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let both = x_pair(at);
    set_y_pair(at, vec2<f32>(one(both.x, at), one(both.y, at + 1u)), at + 1u < p.n);
}

fn one(x: f32, at: u32) -> f32 {
    let column = at % p.width;
    var value = x * scale(column);
    if has_bias() { value += bias(column); }
    return activation(p.kind, value);
}

// In place.
kernel multiply(matrix: mut [X], vector: [f32], n: u32, width: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let factors = vec2<f32>(vector(at % p.width), vector((at + 1u) % p.width));
    set_matrix_pair(at, matrix_pair(at) * factors, at + 1u < p.n);
}
