// Layer norm of wide rows, a block for each: every thread holds D packs of it. The same as in
// `kernel.cu`. Vectors are of dtype Y, and lie within rows of several.

// What a row is multiplied by.
DEVICE void factors(const Y* scale, u64 at, int plus_one, float (&to)[P]) {
    for (int i = 0; i < P; i++) to[i] = 1.0f;
    if (!scale) return;
    load(scale + at, to);
    if (plus_one) for (int i = 0; i < P; i++) to[i] += 1.0f;
}

KERNEL layer_norm(const X* x, const Y* scale, const Y* shift, X* y, u64 rows, u64 width,
                  u64 rows_per_vector, u64 scale_width, u64 scale_first, u64 shift_width,
                  u64 shift_first, float epsilon, int plus_one) {
    u64 row = blockIdx.x, vector = row / rows_per_vector;
    float a[D][P], sum = 0.0f, squares = 0.0f, unused = 0.0f;
    hold(x + row * width, width, a);
#pragma unroll
    for (int k = 0; k < D; k++) for (int i = 0; i < P; i++) sum += a[k][i];
    block_sums(0, sum, unused);
    float mean = sum / width;
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) < width) for (int i = 0; i < P; i++) squares += (a[k][i] - mean) * (a[k][i] - mean);
    }
    block_sums(1, squares, unused);
    float inverse = 1.0f / sqrtf(squares / width + epsilon), f[P], s[P];
    if (scale) scale += vector * scale_width + scale_first;
    if (shift) shift += vector * shift_width + shift_first;
#pragma unroll
    for (int k = 0; k < D; k++) {
        u64 at = place(k);
        if (at >= width) continue;
        factors(scale, at, plus_one, f);
        if (shift) load(shift + at, s);
        for (int i = 0; i < P; i++) a[k][i] = (a[k][i] - mean) * inverse * f[i] + (shift ? s[i] : 0.0f);
        store(a[k], y + row * width + at, 0);
    }
}

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
KERNEL layer_norm_backward(const X* x, const Y* scale, const X* gradient, X* out, u64 rows, u64 width,
                           u64 rows_per_vector, u64 scale_width, u64 scale_first, float epsilon,
                           int plus_one, int add) {
    u64 row = blockIdx.x;
    if (scale) scale += row / rows_per_vector * scale_width + scale_first;
    float a[D][P], g[D][P], f[P], sum = 0.0f, g_sum = 0.0f, squares = 0.0f, along = 0.0f;
    hold(x + row * width, width, a);
    hold(gradient + row * width, width, g);
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) >= width) continue;
        factors(scale, place(k), plus_one, f);
        for (int i = 0; i < P; i++) {
            sum += a[k][i];
            g_sum += g[k][i] *= f[i];
        }
    }
    block_sums(0, sum, g_sum);
    float mean = sum / width, g_mean = g_sum / width;
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) >= width) continue;
        for (int i = 0; i < P; i++) {
            a[k][i] -= mean;
            squares += a[k][i] * a[k][i];
            along += g[k][i] * a[k][i];
        }
    }
    block_sums(1, squares, along);
    float inverse = 1.0f / sqrtf(squares / width + epsilon), slope = along * inverse / width;
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) >= width) continue;
        for (int i = 0; i < P; i++) g[k][i] = (g[k][i] - g_mean - a[k][i] * inverse * slope) * inverse;
        store(g[k], out + row * width + place(k), add);
    }
}
