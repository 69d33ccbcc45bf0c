// Layer norm, PER_ROW threads for each row. The row is read again for each pass over it: it is in the cache by
// then. Vectors are of format Y, and lie within rows of several.

const STEP: u32 = 8u * PER_ROW;

struct Moments { mean: f32, inverse: f32 }

fn moments(lane: u32, first: u32, end: u32) -> Moments {
    let place = 8u * (lane % PER_ROW);
    var sum = 0.0;
    for (var i = place; i < end; i += STEP) { sum += sum_of_eight(x_eight(first + i, end - i)); }
    let mean = row_sum(lane, sum) / f32(p.width);
    var squares = 0.0;
    for (var i = place; i < end; i += STEP) {
        let distance = only(less(x_eight(first + i, end - i), mean), end - i);
        squares += sum_of_eight(multiplied(distance, distance));
    }
    return Moments(mean, 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon));
}

// What a row is multiplied by.
fn factors(vector: u32, i: u32) -> Eight {
    if !has_scale() { return Eight(vec4<f32>(1.0), vec4<f32>(1.0)); }
    return less(scale_eight(vector * p.scale_width + p.scale_first + i, p.width - i), -f32(p.plus_one));
}

kernel layer_norm(x: [X by WIDE], scale: [Y by WIDE], shift: [Y by WIDE], y: mut [X by WIDE], rows: u32,
                  width: u32, rows_per_vector: u32, scale_width: u32, scale_first: u32, shift_width: u32,
                  shift_first: u32, epsilon: f32, plus_one: u32) {
    let row = thread / PER_ROW;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let m = moments(lane, first, end);
    let vector = row / p.rows_per_vector;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let n = end - i;
        var value = multiplied(times(m.inverse, less(x_eight(first + i, n), m.mean)), factors(vector, i));
        if has_shift() { value = plus(value, shift_eight(vector * p.shift_width + p.shift_first + i, n)); }
        set_y_eight(first + i, value, n);
    }
}

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
kernel layer_norm_backward(x: [X by WIDE], scale: [Y by WIDE], gradient: [X by WIDE], result: mut [X by WIDE],
                           rows: u32, width: u32, rows_per_vector: u32, scale_width: u32, scale_first: u32,
                           epsilon: f32, plus_one: u32, add: u32) {
    let row = thread / PER_ROW;
    let first = row * p.width;
    let end = select(0u, p.width, row < p.rows);
    let m = moments(lane, first, end);
    let vector = row / p.rows_per_vector;
    var sum = 0.0;
    var along = 0.0;
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = only(multiplied(gradient_eight(first + i, end - i), factors(vector, i)), end - i);
        sum += sum_of_eight(g);
        along += sum_of_eight(multiplied(g, times(m.inverse, less(x_eight(first + i, end - i), m.mean))));
    }
    let g_mean = row_sum(lane, sum) / f32(p.width);
    let slope = row_sum(lane, along) / f32(p.width);
    for (var i = 8u * (lane % PER_ROW); i < end; i += STEP) {
        let g = multiplied(gradient_eight(first + i, end - i), factors(vector, i));
        let xn = times(m.inverse, less(x_eight(first + i, end - i), m.mean));
        let value = times(m.inverse, plus(less(g, g_mean), times(-slope, xn)));
        put_result_eight(first + i, value, end - i, p.add);
    }
}
