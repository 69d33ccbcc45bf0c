// Normal random numbers, a thread for each.

KERNEL normal(X* out, u64 n, float deviation, u64 seed, u64 stream, u64 first) {
    u64 at = thread();
    if (at >= n) return;
    out[at] = from_f32<X>(deviation * random_normal(seed, stream, first + at));
}
