// AdamW with moments of 8 bits. `books` has, for the signed and then for the unsigned codebook, 256 values
// and then the bounds between sizes above zero.

var<workgroup> codes_now: array<vec2<u32>, 256>;

// A workgroup for each 256 elements, which share a scale: their largest size.
kernel adamw_8bit(params: mut [f32], gradients: [f32], first_codes: mut [u8], first_scales: mut [f32],
                  second_codes: mut [u8], second_scales: mut [f32], books: [f32], norm: [f32],
                  signed_zero: u32, unsigned_zero: u32, n: u32, most: f32, scale: f32, remains: f32,
                  news: f32, keeps: f32, squares: f32, correction: f32, epsilon: f32, rate: f32) {
    var scale = p.scale;
    var is_defined = true;
    if has_norm() {
        let length = scale * norm(0u);
        is_defined = is_finite(length);
        scale *= min(1.0, p.most / (length + 1e-6));
    }
    var mean = 0.0;
    var square = 0.0;
    if thread < p.n {
        mean = books(first_codes(thread)) * first_scales(group);
        square = books(512u + second_codes(thread)) * second_scales(group);
        let g = scale * gradients(thread);
        mean += (g - mean) * p.news;
        square = square * p.keeps + g * g * p.squares;
        if is_defined {
            let step = mean / (sqrt(square) * p.correction + p.epsilon);
            set_params(thread, params(thread) * p.remains - p.rate * step);
        }
    }
    let mean_scale = group_max(lane, abs(mean));
    let square_scale = group_max(lane, square);
    codes_now[lane] = vec2<u32>(nearest(0u, p.signed_zero, mean / select(mean_scale, 1.0, mean_scale == 0.0)),
                                nearest(512u, p.unsigned_zero,
                                        square / select(square_scale, 1.0, square_scale == 0.0)));
    workgroupBarrier();
    if !is_defined { return; }
    if lane == 0u {
        set_first_scales(group, mean_scale);
        set_second_scales(group, square_scale);
    }
    if lane % 4u != 0u || thread >= p.n { return; }
    let four = array<vec2<u32>, 4>(codes_now[lane], codes_now[lane + 1u], codes_now[lane + 2u], codes_now[lane + 3u]);
    set_first_codes_four(thread, vec4<u32>(four[0].x, four[1].x, four[2].x, four[3].x));
    set_second_codes_four(thread, vec4<u32>(four[0].y, four[1].y, four[2].y, four[3].y));
}

// The code nearest to a number in the book that begins at a place.
fn nearest(book: u32, zero: u32, x: f32) -> u32 {
    let size = abs(x);
    var low = 0u;
    var high = 255u;
    while low < high {
        let middle = (low + high) / 2u;
        if books(book + 256u + middle) < size { low = middle + 1u; } else { high = middle; }
    }
    let code = i32(zero) + select(i32(low), -i32(low), x < 0.0);
    return u32(clamp(code, 0, 255));
}
