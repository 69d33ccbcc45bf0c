// Root-mean-square norm over channels: a block finds the factors of 32 pixels, then a thread for each P pixels applies
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

// Blocks lie in a grid: a row of it for some channels, a thread for each P pixels, so that nothing has to be
// divided.
KERNEL channel_rms_norm(const X* x, const float* factors, const float* weight, X* y, u32 channels, u64 plane,
                        int kind) {
    u64 pixel = thread() * P, sample = blockIdx.z;
    if (pixel >= plane) return;
    float by[P], numbers[P];
    load(factors + sample * plane + pixel, by);
    for (u32 channel = blockIdx.y; channel < channels; channel += gridDim.y) {
        u64 from = (sample * channels + channel) * plane + pixel;
        load(x + from, numbers);
        for (int j = 0; j < P; j++) numbers[j] = activation(kind, numbers[j] * by[j] * weight[channel]);
        store(numbers, y + from, 0);
    }
}
