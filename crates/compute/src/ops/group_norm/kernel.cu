// Group norm: a block finds the statistics of a group, then a thread for each element applies them.

// Mean and 1 / std. Distances are taken from the first number, which is near the others where the
// mean is large, so that one pass is as good as two.
KERNEL group_statistics(const X* x, float* statistics, u64 size, float epsilon) {
    x += blockIdx.x * size;
    double center = to_f32(x[0]), sum = 0.0, squares = 0.0;
    for (u64 i = threadIdx.x; i < size; i += blockDim.x) {
        double distance = to_f32(x[i]) - center;
        sum += distance;
        squares += distance * distance;
    }
    sum = block_sum(sum);
    squares = block_sum(squares);
    if (threadIdx.x) return;
    double distance = sum / size, variance = squares / size - distance * distance;
    if (variance < 0.0) variance = 0.0;
    statistics[2 * blockIdx.x] = (float)(center + distance);
    statistics[2 * blockIdx.x + 1] = (float)(1.0 / sqrt(variance + epsilon));
}

KERNEL group_norm(const X* x, const float* statistics, const float* weight, const float* bias, X* y,
                  u64 n, u64 size, u64 plane, u64 channels, int kind) {
    u64 at = thread();
    if (at >= n) return;
    u64 group = at / size, channel = at / plane % channels;
    float factor = statistics[2 * group + 1] * weight[channel];
    float a = (to_f32(x[at]) - statistics[2 * group]) * factor + bias[channel];
    y[at] = from_f32<X>(activation(kind, a));
}
