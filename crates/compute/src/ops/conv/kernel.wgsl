// What a convolution needs besides matmuls.

// What windows see: a row for each number of the kernel, a column for each pixel. A thread for every two.
kernel im2col(clip: [X], seen: mut [X], n: u32, pixels: u32, first_pixel: u32, frames: u32, height: u32, width: u32,
               kernel_frames: u32, kernel_height: u32, kernel_width: u32, stride_frames: u32, stride_rows: u32,
               stride_columns: u32, front: u32, top: u32, left: u32, result_height: u32, result_width: u32,
               replicates: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_seen_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

// Where a place of the padded clip lies in it along an axis: its edge where edges are repeated, else beyond the clip,
// since before it this wraps around.
fn source(at: u32, before: u32, size: u32) -> u32 {
    if p.replicates == 0u { return at - before; }
    return min(max(at, before) - before, size - 1u);
}

fn one(at: u32) -> f32 {
    let tap = at / p.pixels;
    let pixel = at % p.pixels + p.first_pixel;
    let tap_row = tap / p.kernel_width;
    let tap_frame = tap_row / p.kernel_height;
    let channel = tap_frame / p.kernel_frames;
    let line = pixel / p.result_width;
    let first_frame = line / p.result_height * p.stride_frames;
    let frame = source(first_frame + tap_frame % p.kernel_frames, p.front, p.frames);
    let row = source(line % p.result_height * p.stride_rows + tap_row % p.kernel_height, p.top, p.height);
    let first_column = pixel % p.result_width * p.stride_columns;
    let column = source(first_column + tap % p.kernel_width, p.left, p.width);
    if frame >= p.frames || row >= p.height || column >= p.width { return 0.0; }
    return clip(((channel * p.frames + frame) * p.height + row) * p.width + column);
}

// A strip's sums into their place in the clip, with bias, activation and rounding. A thread for each.
kernel finish(sums: [f32], bias: [f32], y: mut [X], n: u32, pixels: u32, first_pixel: u32,
              first_channel: u32, clip_pixels: u32, kind: u32) {
    if thread >= p.n { return; }
    let channel = thread / p.pixels + p.first_channel;
    let pixel = thread % p.pixels + p.first_pixel;
    var value = sums(thread);
    if has_bias() { value += bias(channel); }
    set_y(channel * p.clip_pixels + pixel, activation(p.kind, value));
}
