// Root-mean-square norm, a warp for each row. The row is read again for each pass over it: it is in the
// cache by then.

DEVICE float inverse_root(const X* x, u64 width, float epsilon) {
    float squares = 0.0f, a[P];
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        for (int i = 0; i < P; i++) squares += a[i] * a[i];
    }
    return 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
}

KERNEL rms_norm(const X* x, const float* weight, X* y, u64 rows, u64 width, float epsilon) {
    u64 row = warp();
    if (row >= rows) return;
    x += row * width;
    y += row * width;
    float inverse = inverse_root(x, width, epsilon), a[P], w[P];
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        if (weight) load(weight + at, w);
        for (int i = 0; i < P; i++) a[i] = a[i] * inverse * (weight ? w[i] : 1.0f);
        store(a, y + at, 0);
    }
}

// With g = gradient * weight: dx = (g - xn * mean(g * xn)) * inverse
KERNEL rms_norm_backward(const X* x, const float* weight, const X* gradient, Y* out, u64 rows,
                         u64 width, float epsilon, int add) {
    u64 row = warp();
    if (row >= rows) return;
    x += row * width;
    gradient += row * width;
    out += row * width;
    float squares = 0.0f, sum = 0.0f, a[P], g[P], w[P];
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        load(gradient + at, g);
        if (weight) load(weight + at, w);
        for (int i = 0; i < P; i++) {
            squares += a[i] * a[i];
            sum += g[i] * (weight ? w[i] : 1.0f) * a[i];
        }
    }
    float inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
    float slope = warp_sum(sum) * inverse / width;
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        load(gradient + at, g);
        if (weight) load(weight + at, w);
        for (int i = 0; i < P; i++) {
            g[i] = (g[i] * (weight ? w[i] : 1.0f) - a[i] * inverse * slope) * inverse;
        }
        store(g, out + at, add);
    }
}
