// Normal random numbers by Box and Muller in f64, a thread for each, as `Stream::normal` finds them.

KERNEL normal(X* out, u64 n, float deviation, u64 seed, u64 stream, u64 first) {
    u64 at = thread();
    if (at >= n) return;
    u64 index = first + at, pair = index / 2 * 2;
    double radius = random_uniform(seed, stream, pair), angle = random_uniform(seed, stream, pair + 1);
    double sine, cosine;
    sincos(6.283185307179586476925 * angle, &sine, &cosine);
    float x = (float)(sqrt(-2.0 * log(radius)) * (index % 2 == 0 ? cosine : sine));
    out[at] = from_f32<X>(deviation * x);
}
