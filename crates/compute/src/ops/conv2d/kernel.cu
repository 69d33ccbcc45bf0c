// What a convolution needs besides matmuls.

// What windows see: a row for each number of the kernel, a column for each pixel. A thread for each.
KERNEL im2col(const X* image, X* out, u64 n, u64 pixels, u64 first_pixel, u64 height, u64 width,
               u64 kernel_height, u64 kernel_width, u64 stride, u64 top, u64 left, u64 result_width) {
    u64 at = thread();
    if (at >= n) return;
    u64 tap = at / pixels, pixel = at % pixels + first_pixel;
    u64 channel = tap / (kernel_height * kernel_width), rest = tap % (kernel_height * kernel_width);
    // Above or left of the image these wrap around, and are beyond it too.
    u64 row = pixel / result_width * stride + rest / kernel_width - top;
    u64 column = pixel % result_width * stride + rest % kernel_width - left;
    bool is_inside = row < height && column < width;
    out[at] = is_inside ? image[(channel * height + row) * width + column] : from_f32<X>(0.0f);
}

// A strip's sums into their place in the image, with bias, activation and rounding. A thread for each.
KERNEL finish(const float* sums, const float* bias, X* y, u64 n, u64 pixels, u64 first_pixel,
              u64 first_channel, u64 image_pixels, int kind) {
    u64 at = thread();
    if (at >= n) return;
    u64 channel = at / pixels + first_channel, pixel = at % pixels + first_pixel;
    float x = sums[at] + (bias ? bias[channel] : 0.0f);
    y[channel * image_pixels + pixel] = from_f32<X>(activation(kind, x));
}
