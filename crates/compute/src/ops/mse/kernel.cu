// The mean squared error. A row's squares are summed in f32 by its block, rows in f64 in their order.

// What a row's error is multiplied by.
DEVICE float factor(const float* weights, const float* mask, u64 row, u64 rows_per_sample) {
    return (weights ? weights[row / rows_per_sample] : 1.0f) * (mask ? mask[row] : 1.0f);
}

// A block for every `share` rows writes their sum.
KERNEL mse_rows(const X* prediction, const Y* target, const float* weights, const float* mask,
                const float* elements, double* partial, u64 rows, u64 width, u64 rows_per_sample, u64 share) {
    u64 first = blockIdx.x * share, end = first + share < rows ? first + share : rows;
    double total = 0.0;
    for (u64 row = first; row < end; row++) {
        float squares = 0.0f;
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            float error = to_f32(prediction[row * width + i]) - to_f32(target[row * width + i]);
            squares += elements ? elements[row * width + i] * error * error : error * error;
        }
        total += (double)factor(weights, mask, row, rows_per_sample) * squares;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) partial[blockIdx.x] = total;
}

// One over what the sum is divided by; zero where that is zero. All threads of one block.
DEVICE double inverse_count(const float* mask, u64 rows, u64 width) {
    if (!mask) return 1.0 / ((double)rows * width);
    double sum = 0.0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) sum += mask[row];
    sum = block_sum(sum) * width;
    return sum == 0.0 ? 0.0 : 1.0 / sum;
}

// One block.
KERNEL mse_finish(const double* partial, const float* mask, float* mean, u64 blocks, u64 rows,
                  u64 width) {
    double inverse = inverse_count(mask, rows, width), total = 0.0;
    for (u64 i = threadIdx.x; i < blocks; i += blockDim.x) total += partial[i];
    total = block_sum(total);
    if (threadIdx.x == 0) *mean = (float)(total * inverse);
}

// One block.
KERNEL mse_count(const float* mask, double* inverse, u64 rows, u64 width) {
    double found = inverse_count(mask, rows, width);
    if (threadIdx.x == 0) *inverse = found;
}

// 2 * gradient * (prediction - target) * factor / count, a thread for every P elements.
KERNEL mse_backward(const X* prediction, const Y* target, const float* weights, const float* mask,
                    const float* elements, const float* gradient, const double* inverse, X* out, u64 packs, u64 width,
                    u64 rows_per_sample, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    double scale = 2.0 * *gradient * *inverse;
    float f = (float)(scale * factor(weights, mask, at / width, rows_per_sample));
    float a[P], b[P];
    load(prediction + at, a);
    load(target + at, b);
    for (int i = 0; i < P; i++) a[i] = (a[i] - b[i]) * f;
    if (elements) {
        for (int i = 0; i < P; i++) a[i] *= elements[at + i];
    }
    store(a, out + at, add);
}
