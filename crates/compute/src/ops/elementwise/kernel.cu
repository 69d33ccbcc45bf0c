// Sums of whole tensors, a thread for every P elements.

KERNEL add(const X* x, const X* y, X* sum, u64 packs) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], b[P];
    load(x + at, a);
    load(y + at, b);
    for (int i = 0; i < P; i++) a[i] += b[i];
    store(a, sum + at, 0);
}

KERNEL scale(const X* x, float factor, X* y, u64 packs) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P];
    load(x + at, a);
    for (int i = 0; i < P; i++) a[i] *= factor;
    store(a, y + at, 0);
}

// The gradient may be rounded and what it is added to not.
KERNEL accumulate(const X* gradient, Y* sum, u64 packs, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P];
    load(gradient + at, a);
    store(a, sum + at, add);
}

// The gate of the row that a number belongs to; a sample's gate lies within a row of all its vectors.
DEVICE const X* gate_of(const X* gates, u64 at, u64 tokens, u64 width, u64 gates_width, u64 first) {
    return gates + at / width / tokens * gates_width + first + at % width;
}

KERNEL gated_add(const X* x, const X* gates, const X* y, X* sum, u64 packs, u64 tokens, u64 width,
                 u64 gates_width, u64 first) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], g[P], b[P];
    load(x + at, a);
    load(gate_of(gates, at, tokens, width, gates_width, first), g);
    load(y + at, b);
    for (int i = 0; i < P; i++) a[i] += g[i] * b[i];
    store(a, sum + at, 0);
}

KERNEL gated(const X* gates, const X* gradient, X* out, u64 packs, u64 tokens, u64 width,
             u64 gates_width, u64 first, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], g[P];
    load(gradient + at, a);
    load(gate_of(gates, at, tokens, width, gates_width, first), g);
    for (int i = 0; i < P; i++) a[i] *= g[i];
    store(a, out + at, add);
}
