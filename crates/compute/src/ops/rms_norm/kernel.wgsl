// Root-mean-square norm, PER_ROW threads for each row. The row is read again for each pass over it: it is in
// the cache by then.

const STEP: u32 = 8u * PER_ROW;

fn inverse_root(lane: u32, first: u32, end: u32) -> f32 {
    var squares = 0.0;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let x = x_eight(first + i, end - i);
        squares += sum_of_eight(multiplied(x, x));
    }
    return 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon);
}

fn weights(i: u32) -> Eight {
    if !has_weight() { return Eight(vec4<f32>(1.0), vec4<f32>(1.0)); }
    return weight_eight(i, p.width - i);
}

kernel rms_norm(x: [X by WIDE], weight: [f32 by WIDE], y: mut [X by WIDE], rows: u32, width: u32,
                epsilon: f32) {
    let row = thread / PER_ROW;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let inverse = inverse_root(lane, first, end);
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        set_y_eight(first + i, multiplied(times(inverse, x_eight(first + i, end - i)), weights(i)), end - i);
    }
}

// With g = gradient * weight: dx = (g - xn * mean(g * xn)) * inverse
kernel rms_norm_backward(x: [X by WIDE], weight: [f32 by WIDE], gradient: [X by WIDE], result: mut [Y by WIDE],
                         rows: u32, width: u32, epsilon: f32, add: u32) {
    let row = thread / PER_ROW;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let inverse = inverse_root(lane, first, end);
    var sum = 0.0;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = multiplied(gradient_eight(first + i, end - i), weights(i));
        sum += sum_of_eight(multiplied(g, times(inverse, x_eight(first + i, end - i))));
    }
    let slope = row_sum(lane, sum) / f32(p.width);
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = multiplied(gradient_eight(first + i, end - i), weights(i));
        let value = times(inverse, plus(g, times(-inverse * slope, x_eight(first + i, end - i))));
        put_result_eight(first + i, value, end - i, p.add);
    }
}
