// Group norm: blocks find the sums of parts of a group, a warp for each group makes its statistics of them, then a
// thread for each P elements applies them.

// The sum of distances and of their squares of each part. Distances are taken from the group's first number, which is
// near the others where the mean is large, so that one pass is as good as two.
KERNEL group_sums(const X* x, double* sums, u64 size, u32 n_parts, u64 part_size) {
    x += blockIdx.x / n_parts * size;
    u64 from = blockIdx.x % n_parts * part_size, end = from + part_size < size ? from + part_size : size;
    double center = to_f32(x[0]), sum = 0.0, squares = 0.0;
    float numbers[P];
    for (u64 i = from + threadIdx.x * P; i < end; i += blockDim.x * P) {
        load(x + i, numbers);
        for (int j = 0; j < P; j++) {
            double distance = numbers[j] - center;
            sum += distance;
            squares += distance * distance;
        }
    }
    sum = block_sum(sum);
    squares = block_sum(squares);
    if (threadIdx.x) return;
    sums[2 * blockIdx.x] = sum;
    sums[2 * blockIdx.x + 1] = squares;
}

// Mean and 1 / std of each group.
KERNEL group_statistics(const X* x, const double* sums, float* statistics, u32 groups, u64 size, u32 n_parts,
                        float epsilon) {
    u64 group = warp();
    if (group >= groups) return;
    double sum = 0.0, squares = 0.0;
    for (u64 part = group * n_parts + lane(); part < (group + 1) * n_parts; part += 32) {
        sum += sums[2 * part];
        squares += sums[2 * part + 1];
    }
    double distance = warp_sum(sum) / size, variance = warp_sum(squares) / size - distance * distance;
    if (variance < 0.0) variance = 0.0;
    if (lane()) return;
    statistics[2 * group] = (float)(to_f32(x[group * size]) + distance);
    statistics[2 * group + 1] = (float)(1.0 / sqrt(variance + epsilon));
}

// Blocks lie in a grid: a row of it for each plane, a thread for each P pixels, so that hardly anything has to be
// divided.
KERNEL group_norm(const X* x, const float* statistics, const float* weight, const float* bias, X* y, u32 planes,
                  u32 channels, u32 group_channels, u64 plane, int kind) {
    u64 pixel = thread() * P;
    if (pixel >= plane) return;
    float numbers[P];
    for (u32 at = blockIdx.y; at < planes; at += gridDim.y) {
        u32 group = at / group_channels, channel = at % channels;
        float mean = statistics[2 * group], factor = statistics[2 * group + 1] * weight[channel];
        load(x + at * plane + pixel, numbers);
        for (int j = 0; j < P; j++) numbers[j] = activation(kind, (numbers[j] - mean) * factor + bias[channel]);
        store(numbers, y + at * plane + pixel, 0);
    }
}
