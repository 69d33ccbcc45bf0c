// Zeros a share of the numbers and scales the others up, a thread for each.

KERNEL drop_out(const X* x, X* out, u64 n, float share, float scale, u64 seed, u64 stream, u64 first) {
    u64 at = thread();
    if (at >= n) return;
    float factor = random_uniform(seed, stream, first + at) < share ? 0.0f : scale;
    out[at] = from_f32<X>(factor * to_f32(x[at]));
}
