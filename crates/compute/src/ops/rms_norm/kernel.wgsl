// Root-mean-square norm, 32 threads for each row. The row is read again for each pass over it: it is in the
// cache by then.

fn inverse_root(lane: u32, first: u32, end: u32) -> f32 {
    var squares = 0.0;
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        let both = x_pair(first + i);
        squares += both.x * both.x + select(0.0, both.y * both.y, i + 1u < end);
    }
    return 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon);
}

fn weights(i: u32) -> vec2<f32> {
    if !has_weight() { return vec2<f32>(1.0); }
    return weight_pair(i);
}

kernel rms_norm(x: [X], weight: [f32], y: mut [X], rows: u32, width: u32, epsilon: f32) {
    let row = thread / 32u;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let inverse = inverse_root(lane, first, end);
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        set_y_pair(first + i, x_pair(first + i) * inverse * weights(i), i + 1u < end);
    }
}

// With g = gradient * weight: dx = (g - xn * mean(g * xn)) * inverse
kernel rms_norm_backward(x: [X], weight: [f32], gradient: [X], result: mut [Y], rows: u32, width: u32,
                         epsilon: f32, add: u32) {
    let row = thread / 32u;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let inverse = inverse_root(lane, first, end);
    var sum = 0.0;
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        let along = gradient_pair(first + i) * weights(i) * (x_pair(first + i) * inverse);
        sum += along.x + select(0.0, along.y, i + 1u < end);
    }
    let slope = row_sum(lane, sum) / f32(p.width);
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        let g = gradient_pair(first + i) * weights(i);
        let value = (g - x_pair(first + i) * inverse * slope) * inverse;
        put_result_pair(first + i, value, i + 1u < end, p.add);
    }
}
