// What a convolution needs besides matmuls. Blocks lie in a grid: a row of it for each channel, a thread for each
// pixel, so that hardly anything has to be divided.

// The pixel of this thread among those of a strip.
DEVICE u32 pixel_of_thread() { return blockIdx.x * blockDim.x + threadIdx.x; }

// Where a place of the padded clip lies in it along an axis: its edge where edges are repeated, else beyond the clip,
// since before it this wraps around.
DEVICE u32 source(u32 at, u32 before, u32 size, int replicates) {
    if (!replicates) return at - before;
    u32 inside = at < before ? 0 : at - before;
    return inside < size ? inside : size - 1;
}

// What windows see: a row for each number of the kernel, a column for each pixel.
KERNEL im2col(const X* clip, X* out, u32 channels, u32 pixels, u32 first_pixel, u32 frames, u32 height, u32 width,
              u32 kernel_frames, u32 kernel_height, u32 kernel_width, u32 stride_frames, u32 stride_rows,
              u32 stride_columns, u32 front, u32 top, u32 left, u32 result_height, u32 result_width, int replicates) {
    u32 at = pixel_of_thread(), pixel = at + first_pixel;
    if (at >= pixels) return;
    u32 line = pixel / result_width, first_column = pixel % result_width * stride_columns;
    u32 first_frame = line / result_height * stride_frames, first_row = line % result_height * stride_rows;
    for (u32 channel = blockIdx.y; channel < channels; channel += gridDim.y) {
        X* to = out + (u64)channel * kernel_frames * kernel_height * kernel_width * pixels + at;
        for (u32 t = 0; t < kernel_frames; t++) {
            u32 frame = source(first_frame + t, front, frames, replicates);
            for (u32 u = 0; u < kernel_height; u++) {
                u32 row = source(first_row + u, top, height, replicates);
                bool is_line = frame < frames && row < height;
                const X* from = clip + (((u64)channel * frames + frame) * height + row) * width;
                for (u32 v = 0; v < kernel_width; v++, to += pixels) {
                    u32 column = source(first_column + v, left, width, replicates);
                    *to = is_line && column < width ? from[column] : from_f32<X>(0.0f);
                }
            }
        }
    }
}

// A strip's sums into their place in the clip, with bias, activation and rounding.
KERNEL finish(const float* sums, const float* bias, X* y, u32 channels, u32 pixels, u32 first_pixel, u32 first_channel,
              u64 clip_pixels, int kind) {
    u32 at = pixel_of_thread();
    if (at >= pixels) return;
    for (u32 row = blockIdx.y; row < channels; row += gridDim.y) {
        u32 channel = row + first_channel;
        float x = sums[(u64)row * pixels + at] + (bias ? bias[channel] : 0.0f);
        y[channel * clip_pixels + first_pixel + at] = from_f32<X>(activation(kind, x));
    }
}
