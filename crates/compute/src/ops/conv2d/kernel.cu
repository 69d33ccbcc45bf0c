// What a convolution needs besides matmuls. Blocks lie in a grid: a row of it for each channel, a thread for each
// pixel, so that hardly anything has to be divided.

// The pixel of this thread among those of a strip.
DEVICE u32 pixel_of_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// What windows see: a row for each number of the kernel, a column for each pixel.
KERNEL im2col(const X* image, X* out, u32 channels, u32 pixels, u32 first_pixel, u32 height, u32 width,
              u32 kernel_height, u32 kernel_width, u32 stride, u32 top, u32 left, u32 result_width) {
    u32 at = pixel_of_thread(), pixel = at + first_pixel;
    if (at >= pixels) return;
    // Above or left of the image these wrap around, and are beyond it too.
    u32 first_row = pixel / result_width * stride - top, first_column = pixel % result_width * stride - left;
    for (u32 channel = blockIdx.y; channel < channels; channel += gridDim.y) {
        const X* from = image + (u64)channel * height * width;
        X* to = out + (u64)channel * kernel_height * kernel_width * pixels + at;
        for (u32 row = first_row; row != first_row + kernel_height; row++) {
            for (u32 column = first_column; column != first_column + kernel_width; column++, to += pixels) {
                bool is_inside = row < height && column < width;
                *to = is_inside ? from[(u64)row * width + column] : from_f32<X>(0.0f);
            }
        }
    }
}

// A strip's sums into their place in the image, with bias, activation and rounding.
KERNEL finish(const float* sums, const float* bias, X* y, u32 channels, u32 pixels, u32 first_pixel, u32 first_channel,
              u64 image_pixels, int kind) {
    u32 at = pixel_of_thread();
    if (at >= pixels) return;
    for (u32 row = blockIdx.y; row < channels; row += gridDim.y) {
        u32 channel = row + first_channel;
        float x = sums[(u64)row * pixels + at] + (bias ? bias[channel] : 0.0f);
        y[channel * image_pixels + first_pixel + at] = from_f32<X>(activation(kind, x));
    }
}
