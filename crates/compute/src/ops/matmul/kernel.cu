// What is done to a matmul's result that the library does not do: bias, activation, and keeping what
// the activation is applied to. A thread for every P elements; the bias is of dtype Y.

KERNEL finish(X* out, const Y* bias, X* before, u64 packs, u64 columns, int kind) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], b[P];
    load(out + at, a);
    if (bias) {
        load(bias + at % columns, b);
        for (int i = 0; i < P; i++) a[i] += b[i];
    }
    if (before) store(a, before + at, 0);
    for (int i = 0; i < P; i++) a[i] = activation(kind, a[i]);
    store(a, out + at, 0);
}

// A strip of sums by the scales of its rows and columns, added to what is there if there is something.
KERNEL scale_and_add(
    const X* sums, const float* row_scales, const float* column_scales, const Y* onto, Y* out, u64 packs, u64 columns
) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], b[P] = {}, scales[P];
    load(sums + at, a);
    load(column_scales + at % columns, scales);
    if (onto) load(onto + at, b);
    float row = row_scales[at / columns];
    for (int i = 0; i < P; i++) b[i] += a[i] * (row * scales[i]);
    store(b, out + at, 0);
}
