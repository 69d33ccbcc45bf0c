// What a convolution needs besides matmuls.

// What windows see: a row for each number of the kernel, a column for each pixel. A thread for every two.
kernel im2col(image: [X], seen: mut [X], n: u32, pixels: u32, first_pixel: u32, height: u32, width: u32,
               kernel_height: u32, kernel_width: u32, stride: u32, top: u32, left: u32,
               result_width: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_seen_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let tap = at / p.pixels;
    let pixel = at % p.pixels + p.first_pixel;
    let channel = tap / (p.kernel_height * p.kernel_width);
    let rest = tap % (p.kernel_height * p.kernel_width);
    // Above or left of the image these wrap around, and are beyond it too.
    let row = pixel / p.result_width * p.stride + rest / p.kernel_width - p.top;
    let column = pixel % p.result_width * p.stride + rest % p.kernel_width - p.left;
    if row >= p.height || column >= p.width { return 0.0; }
    return image((channel * p.height + row) * p.width + column);
}

// A strip's sums into their place in the image, with bias, activation and rounding. A thread for each.
kernel finish(sums: [f32], bias: [f32], y: mut [X], n: u32, pixels: u32, first_pixel: u32,
              first_channel: u32, image_pixels: u32, kind: u32) {
    if thread >= p.n { return; }
    let channel = thread / p.pixels + p.first_channel;
    let pixel = thread % p.pixels + p.first_pixel;
    var value = sums(thread);
    if has_bias() { value += bias(channel); }
    set_y(channel * p.image_pixels + pixel, activation(p.kind, value));
}
