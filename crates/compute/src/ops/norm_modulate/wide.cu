// Layer norm of wide rows: a block for each row, of which every thread has P numbers and reads them once.
// The same as in `kernel.cu`. Vectors are of format Y, and lie within rows of several.

// The sums of two numbers over a block, known to all its threads.
DEVICE void block_sums(float& a, float& b) {
    __shared__ float parts[2][32];
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane() == 0) {
        parts[0][threadIdx.x / 32] = a;
        parts[1][threadIdx.x / 32] = b;
    }
    __syncthreads();
    a = b = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        a += parts[0][i];
        b += parts[1][i];
    }
    __syncthreads();
}

// Brings a row to mean 0 and variance 1; gives 1 / deviation. Threads beyond the row have zeros.
DEVICE float normalise(float (&x)[P], bool is_own, u64 width, float epsilon) {
    float sum = 0.0f, squares = 0.0f;
    for (int i = 0; i < P; i++) sum += x[i];
    float mean = block_sum(sum) / width;
    for (int i = 0; i < P; i++) {
        x[i] = is_own ? x[i] - mean : 0.0f;
        squares += x[i] * x[i];
    }
    float inverse = 1.0f / sqrtf(block_sum(squares) / width + epsilon);
    for (int i = 0; i < P; i++) x[i] *= inverse;
    return inverse;
}

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
    u64 row = blockIdx.x, at = threadIdx.x * P, vector = row / rows_per_vector;
    bool is_own = at < width;
    float a[P] = {}, f[P], s[P];
    if (is_own) load(x + row * width + at, a);
    normalise(a, is_own, width, epsilon);
    if (!is_own) return;
    factors(scale ? scale + vector * scale_width + scale_first : scale, at, plus_one, f);
    if (shift) load(shift + vector * shift_width + shift_first + at, s);
    for (int i = 0; i < P; i++) a[i] = a[i] * f[i] + (shift ? s[i] : 0.0f);
    store(a, y + row * width + at, 0);
}

// With g = gradient * factor: dx = (g - mean(g) - xn * mean(g * xn)) / deviation
KERNEL layer_norm_backward(const X* x, const Y* scale, const X* gradient, X* out, u64 rows, u64 width,
                           u64 rows_per_vector, u64 scale_width, u64 scale_first, float epsilon,
                           int plus_one, int add) {
    u64 row = blockIdx.x, at = threadIdx.x * P;
    bool is_own = at < width;
    float a[P] = {}, g[P] = {}, f[P];
    if (is_own) {
        load(x + row * width + at, a);
        load(gradient + row * width + at, g);
        factors(scale ? scale + row / rows_per_vector * scale_width + scale_first : scale, at, plus_one, f);
        for (int i = 0; i < P; i++) g[i] *= f[i];
    }
    float inverse = normalise(a, is_own, width, epsilon), sum = 0.0f, along = 0.0f;
    for (int i = 0; i < P; i++) {
        sum += g[i];
        along += g[i] * a[i];
    }
    block_sums(sum, along);
    if (!is_own) return;
    for (int i = 0; i < P; i++) g[i] = (g[i] - sum / width - a[i] * (along / width)) * inverse;
    store(g, out + row * width + at, add);
}
