// Softmax of rows in place, a block for each: one pass for the largest number and the sum, one for the result.

KERNEL softmax_rows(float* scores, u64 width) {
    scores += blockIdx.x * width;
    float x[P], most = -INFINITY, total = 0.0f;
    for (u64 i = (u64)threadIdx.x * P; i < width; i += blockDim.x * P) {
        load(scores + i, x);
        float now = most;
        for (int j = 0; j < P; j++) now = larger(now, x[j]);
        // Of nothing but -infinity, weights are zeros.
        float center = now == -INFINITY ? 0.0f : now;
        total *= expf(most - center);
        for (int j = 0; j < P; j++) total += expf(x[j] - center);
        most = now;
    }
    float largest = block_max(most), center = largest == -INFINITY ? 0.0f : largest;
    total = block_sum(total * expf(most - center));
    float inverse = total == 0.0f ? 0.0f : 1.0f / total;
    for (u64 i = (u64)threadIdx.x * P; i < width; i += blockDim.x * P) {
        load(scores + i, x);
        for (int j = 0; j < P; j++) x[j] = expf(x[j] - center) * inverse;
        store(x, scores + i, 0);
    }
}
