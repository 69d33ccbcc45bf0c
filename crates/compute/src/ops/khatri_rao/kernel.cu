// Khatri-Rao products, a thread for every number.

KERNEL khatri_rao(const float* a, const float* b, float* y, u64 n, u64 shared, u64 r, u64 s, int by_rows) {
    u64 at = thread();
    if (at >= n) return;
    u64 pair = by_rows ? at % (r * s) : at / shared, c = by_rows ? at / (r * s) : at % shared;
    u64 i = pair / s, j = pair % s;
    y[at] = a[by_rows ? c * r + i : i * shared + c] * b[by_rows ? c * s + j : j * shared + c];
}

// The gradient of one factor: the sum over all numbers of the other one.
KERNEL khatri_rao_backward(const float* gradient, const float* other, float* out, u64 n, u64 shared, u64 own,
                           u64 others, u64 step, u64 inner, int by_rows, int add) {
    u64 at = thread();
    if (at >= n) return;
    u64 i = by_rows ? at % own : at / shared, c = by_rows ? at / own : at % shared;
    float sum = 0.0f;
    for (u64 j = 0; j < others; j++) {
        u64 pair = i * step + j * inner;
        sum += gradient[by_rows ? c * own * others + pair : pair * shared + c]
            * other[by_rows ? c * others + j : j * shared + c];
    }
    put(out + at, sum, add);
}
