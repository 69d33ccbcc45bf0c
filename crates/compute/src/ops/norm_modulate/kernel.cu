// Layer norm, a warp for each row. The row is read again for each pass over it: it is in the cache by
// then. Vectors are of dtype Y, and lie within rows of several.

DEVICE void moments(const X* x, u64 width, float epsilon, float& mean, float& inverse) {
    float sum = 0.0f, squares = 0.0f, a[P];
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        for (int i = 0; i < P; i++) sum += a[i];
    }
    mean = warp_sum(sum) / width;
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        for (int i = 0; i < P; i++) squares += (a[i] - mean) * (a[i] - mean);
    }
    inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
}

// What a row is multiplied by.
DEVICE void factors(const Y* scale, u64 at, int plus_one, float (&to)[P]) {
    if (!scale) {
        for (int i = 0; i < P; i++) to[i] = 1.0f;
        return;
    }
    load(scale + at, to);
    if (plus_one) for (int i = 0; i < P; i++) to[i] += 1.0f;
}

KERNEL layer_norm(const X* x, const Y* scale, const Y* shift, X* y, u64 rows, u64 width, u64 rows_per_vector,
            u64 scale_width, u64 scale_first, u64 shift_width, u64 shift_first, float epsilon,
            int plus_one) {
    u64 row = warp();
    if (row >= rows) return;
    u64 vector = row / rows_per_vector;
    x += row * width;
    y += row * width;
    if (scale) scale += vector * scale_width + scale_first;
    if (shift) shift += vector * shift_width + shift_first;
    float mean, inverse, a[P], f[P], s[P];
    moments(x, width, epsilon, mean, inverse);
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        factors(scale, at, plus_one, f);
        if (shift) load(shift + at, s);
        for (int i = 0; i < P; i++) a[i] = (a[i] - mean) * inverse * f[i] + (shift ? s[i] : 0.0f);
        store(a, y + at, 0);
    }
}

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
KERNEL layer_norm_backward(const X* x, const Y* scale, const X* gradient, X* out, u64 rows, u64 width,
                     u64 rows_per_vector, u64 scale_width, u64 scale_first, float epsilon,
                     int plus_one, int add) {
    u64 row = warp();
    if (row >= rows) return;
    x += row * width;
    gradient += row * width;
    out += row * width;
    if (scale) scale += row / rows_per_vector * scale_width + scale_first;
    float mean, inverse, a[P], g[P], f[P], sum = 0.0f, along = 0.0f;
    moments(x, width, epsilon, mean, inverse);
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        load(gradient + at, g);
        factors(scale, at, plus_one, f);
        for (int i = 0; i < P; i++) {
            sum += g[i] * f[i];
            along += g[i] * f[i] * ((a[i] - mean) * inverse);
        }
    }
    float g_mean = warp_sum(sum) / width, slope = warp_sum(along) / width;
    for (u64 at = lane() * P; at < width; at += 32 * P) {
        load(x + at, a);
        load(gradient + at, g);
        factors(scale, at, plus_one, f);
        for (int i = 0; i < P; i++) {
            g[i] = (g[i] * f[i] - g_mean - (a[i] - mean) * inverse * slope) * inverse;
        }
        store(g, out + at, add);
    }
}
