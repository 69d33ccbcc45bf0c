// Root-mean-square norm, a block for each row, of which every thread holds D packs.

// What a row is multiplied by.
DEVICE void factors(const float* weight, int pack, float (&to)[P]) {
    if (weight) {
        load(weight + place(pack), to);
    } else {
        for (int i = 0; i < P; i++) to[i] = 1.0f;
    }
}

KERNEL rms_norm(const X* x, const float* weight, X* y, u64 width, float epsilon) {
    u64 row = blockIdx.x * width;
    float a[D][P], w[P], squares = 0.0f, unused = 0.0f;
    hold(x + row, width, a);
#pragma unroll
    for (int k = 0; k < D; k++) for (int i = 0; i < P; i++) squares += a[k][i] * a[k][i];
    block_sums(0, squares, unused);
    float inverse = 1.0f / sqrtf(squares / width + epsilon);
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) >= width) continue;
        factors(weight, k, w);
        for (int i = 0; i < P; i++) a[k][i] *= inverse * w[i];
        store(a[k], y + row + place(k), 0);
    }
}

// With g = gradient * weight: dx = (g - xn * mean(g * xn)) * inverse, if it has a place. With SHARES, which take
// registers, each block has every so many-th row, and sums up gradient * xn: a share of the weight's gradient.
// 32-bit sizes let one block more run on each SM.
template <bool SHARES>
DEVICE void backward_rows(const X* x, const float* weight, const X* gradient, Y* out, float* shares, u32 rows,
                          u32 width, float epsilon, int add) {
    float a[D][P], g[D][P], w[P], o[P], share[D][P] = {};
    for (u32 row = blockIdx.x, step = 0; row < rows; row += gridDim.x, step ^= 1) {
        u64 at = (u64)row * width;
        Pack<Y> before[D] = {};
        hold(x + at, width, a);
        hold(gradient + at, width, g);
        if (out && add) fetch(out + at, width, before);
        float squares = 0.0f, along = 0.0f;
#pragma unroll
        for (int k = 0; k < D; k++) {
            if (place(k) >= width) continue;
            factors(weight, k, w);
            for (int i = 0; i < P; i++) {
                float weighted = g[k][i] * w[i];
                squares += a[k][i] * a[k][i];
                along += weighted * a[k][i];
                if (!SHARES) g[k][i] = weighted;
            }
        }
        block_sums(step, squares, along);
        float inverse = 1.0f / sqrtf(squares / width + epsilon), slope = along * inverse / width;
#pragma unroll
        for (int k = 0; k < D; k++) {
            if (place(k) >= width) continue;
            if (SHARES) factors(weight, k, w);
            unpack(before[k], o);
            for (int i = 0; i < P; i++) {
                a[k][i] *= inverse;
                if (SHARES) {
                    share[k][i] += g[k][i] * a[k][i];
                    g[k][i] *= w[i];
                }
                g[k][i] = (g[k][i] - a[k][i] * slope) * inverse + o[i];
            }
            if (out) store(g[k], out + at + place(k), 0);
        }
        if (!SHARES) return;
    }
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) < width) store(share[k], shares + blockIdx.x * width + place(k), 0);
    }
}

KERNEL rms_norm_backward(const X* x, const float* weight, const X* gradient, Y* out, float* shares, u32 rows,
                         u32 width, float epsilon, int add) {
    backward_rows<false>(x, weight, gradient, out, shares, rows, width, epsilon, add);
}

KERNEL rms_norm_backward_shares(const X* x, const float* weight, const X* gradient, Y* out, float* shares,
                                u32 rows, u32 width, float epsilon, int add) {
    backward_rows<true>(x, weight, gradient, out, shares, rows, width, epsilon, add);
}
