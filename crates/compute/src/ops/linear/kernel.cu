// Dropout: zeros a share of the elements and scales the others up, a thread for each.

KERNEL dropout(const X* x, X* out, u64 n, float share, float scale, u64 seed, u64 stream, u64 first) {
    u64 at = thread();
    if (at >= n) return;
    float factor = random_uniform(seed, stream, first + at) < share ? 0.0f : scale;
    out[at] = from_f32<X>(factor * to_f32(x[at]));
}

// Up to three tensors, one after the other in `to`; a thread for each element of it.
KERNEL round_all(X* to, const float* a, u64 a_first, u64 a_count, const float* b, u64 b_first, u64 b_count,
                 const float* c, u64 c_first, u64 c_count) {
    u64 at = thread();
    if (at - a_first < a_count) to[at] = from_f32<X>(a[at - a_first]);
    if (at - b_first < b_count) to[at] = from_f32<X>(b[at - b_first]);
    if (at - c_first < c_count) to[at] = from_f32<X>(c[at - c_first]);
}
