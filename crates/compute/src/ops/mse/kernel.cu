// The mean cost of errors. A row's costs are summed in f32 by its block, rows in f64 in their order.

// CostKind in mod.rs; 0 is the square.
#define ABSOLUTE 1
#define HUBER 2
#define PSEUDO_HUBER 3

// What an error d costs.
DEVICE float cost(int kind, float d, float c) {
    float size = fabsf(d);
    if (kind == ABSOLUTE) return size;
    if (kind == HUBER) return size <= c ? 0.5f * d * d : c * (size - 0.5f * c);
    // 2c(sqrt(d^2 + c^2) - c) without the difference of two near numbers.
    if (kind == PSEUDO_HUBER) return 2.0f * c * d * (d / (sqrtf(d * d + c * c) + c));
    return d * d;
}

// Its derivative. NaN stays NaN.
DEVICE float slope(int kind, float d, float c) {
    if (kind == ABSOLUTE) return d > 0.0f ? 1.0f : d < 0.0f ? -1.0f : d;
    if (kind == HUBER) return d > c ? c : d < -c ? -c : d;
    if (kind == PSEUDO_HUBER) return 2.0f * c * d / sqrtf(d * d + c * c);
    return 2.0f * d;
}

// What a row's error is multiplied by.
DEVICE float factor(const float* weights, const float* mask, u64 row, u64 rows_per_sample) {
    return (weights ? weights[row / rows_per_sample] : 1.0f) * (mask ? mask[row] : 1.0f);
}

// The threshold of a row's errors.
DEVICE float threshold(const float* thresholds, u64 row, u64 rows_per_sample) {
    return thresholds ? thresholds[row / rows_per_sample] : 1.0f;
}

// A block for every `share` rows writes their sum.
KERNEL mse_rows(const X* prediction, const Y* target, const float* weights, const float* mask,
                const float* elements, const float* thresholds, double* partial, u64 rows, u64 width,
                u64 rows_per_sample, u64 share, int kind) {
    u64 first = blockIdx.x * share, end = first + share < rows ? first + share : rows;
    double total = 0.0;
    for (u64 row = first; row < end; row++) {
        float costs = 0.0f, c = threshold(thresholds, row, rows_per_sample);
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            float error = to_f32(prediction[row * width + i]) - to_f32(target[row * width + i]);
            float own = cost(kind, error, c);
            costs += elements ? elements[row * width + i] * own : own;
        }
        total += (double)factor(weights, mask, row, rows_per_sample) * costs;
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

// gradient * cost'(prediction - target) * factor / count, a thread for every P elements.
KERNEL mse_backward(const X* prediction, const Y* target, const float* weights, const float* mask,
                    const float* elements, const float* thresholds, const float* gradient, const double* inverse,
                    X* out, u64 packs, u64 width, u64 rows_per_sample, int kind, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    double scale = (double)*gradient * *inverse;
    float c = threshold(thresholds, at / width, rows_per_sample);
    float f = (float)(scale * factor(weights, mask, at / width, rows_per_sample));
    float a[P], b[P];
    load(prediction + at, a);
    load(target + at, b);
    for (int i = 0; i < P; i++) a[i] = slope(kind, a[i] - b[i], c) * f;
    if (elements) {
        for (int i = 0; i < P; i++) a[i] *= elements[at + i];
    }
    store(a, out + at, add);
}
