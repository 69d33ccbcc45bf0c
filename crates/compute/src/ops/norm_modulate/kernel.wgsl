// Layer norm, 32 threads for each row. The row is read again for each pass over it: it is in the cache by
// then. Vectors are of format Y, and lie within rows of several.

struct Moments { mean: f32, inverse: f32 }

fn moments(lane: u32, first: u32, end: u32) -> Moments {
    let place = 2u * (lane % 32u);
    var sum = 0.0;
    for (var i = place; i < end; i += 64u) {
        let both = x_pair(first + i);
        sum += both.x + select(0.0, both.y, i + 1u < end);
    }
    let mean = row_sum(lane, sum) / f32(p.width);
    var squares = 0.0;
    for (var i = place; i < end; i += 64u) {
        let distance = x_pair(first + i) - mean;
        squares += distance.x * distance.x + select(0.0, distance.y * distance.y, i + 1u < end);
    }
    return Moments(mean, 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon));
}

// What a row is multiplied by.
fn factors(vector: u32, i: u32) -> vec2<f32> {
    if !has_scale() { return vec2<f32>(1.0); }
    return scale_pair(vector * p.scale_width + p.scale_first + i) + f32(p.plus_one);
}

kernel layer_norm(x: [X], scale: [Y], shift: [Y], y: mut [X], rows: u32, width: u32, rows_per_vector: u32,
                  scale_width: u32, scale_first: u32, shift_width: u32, shift_first: u32, epsilon: f32,
                  plus_one: u32) {
    let row = thread / 32u;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let m = moments(lane, first, end);
    let vector = row / p.rows_per_vector;
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        var value = (x_pair(first + i) - m.mean) * m.inverse * factors(vector, i);
        if has_shift() { value += shift_pair(vector * p.shift_width + p.shift_first + i); }
        set_y_pair(first + i, value, i + 1u < end);
    }
}

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
kernel layer_norm_backward(x: [X], scale: [Y], gradient: [X], result: mut [X], rows: u32, width: u32,
                           rows_per_vector: u32, scale_width: u32, scale_first: u32, epsilon: f32,
                           plus_one: u32, add: u32) {
    let row = thread / 32u;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let m = moments(lane, first, end);
    let vector = row / p.rows_per_vector;
    var sum = 0.0;
    var along = 0.0;
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        var g = gradient_pair(first + i) * factors(vector, i);
        if i + 1u >= end { g.y = 0.0; }
        sum += g.x + g.y;
        let gx = g * ((x_pair(first + i) - m.mean) * m.inverse);
        along += gx.x + select(0.0, gx.y, i + 1u < end);
    }
    let g_mean = row_sum(lane, sum) / f32(p.width);
    let slope = row_sum(lane, along) / f32(p.width);
    for (var i = 2u * (lane % 32u); i < end; i += 64u) {
        let g = gradient_pair(first + i) * factors(vector, i);
        let xn = (x_pair(first + i) - m.mean) * m.inverse;
        put_result_pair(first + i, (g - g_mean - xn * slope) * m.inverse, i + 1u < end, p.add);
    }
}
