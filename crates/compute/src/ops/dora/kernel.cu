// Norms of rows, a warp for each.

KERNEL row_norms(const X* weight, float* norms, u64 rows, u64 width) {
    u64 row = warp();
    if (row >= rows) return;
    float squares = 0.0f;
    for (u64 i = lane(); i < width; i += 32) {
        float x = to_f32(weight[row * width + i]);
        squares += x * x;
    }
    squares = warp_sum(squares);
    if (lane() == 0) norms[row] = sqrtf(squares);
}

// sqrt(norm^2 + scale * b * cross) for each row b of `up`.
KERNEL adapted_norms(const float* norms, const float* up, const float* cross, float scale,
                     float* adapted, u64 rows, u64 rank) {
    u64 row = warp();
    if (row >= rows) return;
    float sum = 0.0f;
    for (u64 i = lane(); i < rank; i += 32) sum += up[row * rank + i] * cross[row * rank + i];
    sum = warp_sum(sum);
    if (lane()) return;
    float before = norms[row] * norms[row], square = before + scale * sum;
    // An adapter that cancels its row leaves nothing but rounding, perhaps below zero; and a row of
    // zeros must not turn its magnitude, zero too, into NaN.
    float least = 1.1920929e-7f * before + 1.17549435e-38f;
    adapted[row] = sqrtf(square < least ? least : square);
}

// A thread for each element.
KERNEL divide(const float* x, const float* by, float* out, u64 n, int add) {
    u64 at = thread();
    if (at < n) out[at] = (add ? out[at] : 0.0f) + x[at] / by[at];
}
