// Norm and rotation of heads of D numbers, a power of two, of which each thread has P: D / P threads share a
// head, and a warp has several heads. The same as in `kernel.cu`, with a head read once; the whole head is turned, or nothing
// of it. Heads are counted in 32 bits: a division of 64-bit numbers takes as long as reading memory.

#define SHARE (D / P)

// What a thread has to do with.
struct Part {
    u64 at;      // of its first number among all
    u32 first;   // of its numbers in the head
    bool is_own; // whether there is such a head; threads without one repeat the last
    const float* angles;
};

DEVICE Part part(u32 heads, u32 n_heads, const float* table, u32 table_rows) {
    u32 head = (blockIdx.x * blockDim.x + threadIdx.x) / SHARE;
    Part p;
    p.is_own = head < heads;
    if (!p.is_own) head = heads - 1;
    p.first = threadIdx.x % SHARE * P;
    p.at = (u64)head * D + p.first;
    p.angles = table ? table + (u64)(head / n_heads % table_rows) * D : table;
    return p;
}

// Over the threads of a head.
DEVICE float head_sum(float x) {
    for (int step = SHARE / 2; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// Turns the pairs of a head by their angles, forth or back. Halves of a pair lie beside each other, or in
// the thread that is half a head away.
DEVICE void turn(const Part& p, int half_split, float sign, float (&x)[P]) {
    if (!p.angles) return;
    if (!half_split) {
        float angles[P];
        load(p.angles + p.first, angles);
        for (int i = 0; i < P; i += 2) {
            float a = x[i], b = x[i + 1], sine = sign * angles[i + 1];
            x[i] = a * angles[i] - b * sine;
            x[i + 1] = a * sine + b * angles[i];
        }
        return;
    }
    bool is_second = p.first >= D / 2;
    const float* angles = p.angles + 2 * (p.first % (D / 2));
    for (int i = 0; i < P; i++) {
        float other = __shfl_xor_sync(~0u, x[i], SHARE / 2);
        float cosine = angles[2 * i], sine = sign * angles[2 * i + 1];
        x[i] = is_second ? other * sine + x[i] * cosine : x[i] * cosine - other * sine;
    }
}

DEVICE float inverse_root(const float (&x)[P], float epsilon) {
    float squares = 0.0f;
    for (int i = 0; i < P; i++) squares += x[i] * x[i];
    return rsqrtf(head_sum(squares) / D + epsilon);
}

KERNEL qk_norm_rope(const X* x, const float* weight, const float* table, X* y, u64 heads, u64 d,
                    u64 n_heads, u64 table_rows, u64 rotary, int half_split, float epsilon) {
    Part p = part(heads, n_heads, table, table_rows);
    float a[P], w[P];
    load(x + p.at, a);
    if (weight) {
        load(weight + p.first, w);
        float inverse = inverse_root(a, epsilon);
        for (int i = 0; i < P; i++) a[i] *= inverse * w[i];
    }
    turn(p, half_split, 1.0f, a);
    if (p.is_own) store(a, y + p.at, 0);
}

// In place: the gradient of the result becomes that of x.
KERNEL qk_norm_rope_backward(const X* x, const float* weight, const float* table, X* gradient,
                             u64 heads, u64 d, u64 n_heads, u64 table_rows, u64 rotary, int half_split,
                             float epsilon) {
    Part p = part(heads, n_heads, table, table_rows);
    float a[P], g[P], w[P];
    load(gradient + p.at, g);
    turn(p, half_split, -1.0f, g);
    if (weight) {
        load(x + p.at, a);
        load(weight + p.first, w);
        float inverse = inverse_root(a, epsilon), sum = 0.0f;
        for (int i = 0; i < P; i++) sum += g[i] * w[i] * (a[i] * inverse);
        float slope = head_sum(sum) / D;
        for (int i = 0; i < P; i++) g[i] = (g[i] * w[i] - a[i] * inverse * slope) * inverse;
    }
    if (p.is_own) store(g, gradient + p.at, 0);
}
