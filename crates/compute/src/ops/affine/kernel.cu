// Channels scaled and shifted, a thread for every P elements of a row.

KERNEL affine(const X* x, const float* scale, const float* bias, X* y, u64 packs, u64 width, int kind) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    u64 column = at % width;
    float a[P], s[P], b[P];
    load(x + at, a);
    load(scale + column, s);
    if (bias) load(bias + column, b);
    for (int i = 0; i < P; i++) a[i] = activation(kind, a[i] * s[i] + (bias ? b[i] : 0.0f));
    store(a, y + at, 0);
}
