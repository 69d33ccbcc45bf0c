// Root-mean-square norm over channels: a block finds the factors of 32 pixels, then a thread for each element applies
// them.

// Every warp of a block has the same pixels, neighbours of each other, and its share of the channels.
KERNEL channel_factors(const X* x, float* factors, u32 channels, u64 plane, u32 per_sample, float epsilon) {
    __shared__ float parts[8][32];
    u32 sample = blockIdx.x / per_sample, warp = threadIdx.x / 32;
    u64 pixel = blockIdx.x % per_sample * 32 + lane();
    float sum = 0.0f;
    x += (u64)sample * channels * plane + pixel;
    if (pixel < plane) {
        for (u32 channel = warp; channel < channels; channel += 8) {
            float a = to_f32(x[channel * plane]);
            sum += a * a;
        }
    }
    parts[warp][lane()] = sum;
    __syncthreads();
    if (warp || pixel >= plane) return;
    for (u32 i = 1; i < 8; i++) sum += parts[i][lane()];
    factors[sample * plane + pixel] = sqrtf((float)channels) / larger(sqrtf(sum), epsilon);
}

// Blocks lie in a grid: a row of it for each plane, a thread for each pixel, so that hardly anything has to be divided.
KERNEL channel_rms_norm(const X* x, const float* factors, const float* weight, X* y, u32 planes, u32 channels,
                        u64 plane, int kind) {
    u64 pixel = thread();
    if (pixel >= plane) return;
    for (u32 at = blockIdx.y; at < planes; at += gridDim.y) {
        u64 from = at * plane + pixel;
        float a = to_f32(x[from]) * factors[at / channels * plane + pixel] * weight[at % channels];
        y[from] = from_f32<X>(activation(kind, a));
    }
}
