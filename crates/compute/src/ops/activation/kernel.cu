// Activations, a thread for every P elements.

KERNEL activate(const X* x, X* y, u64 packs, int kind) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P];
    load(x + at, a);
    for (int i = 0; i < P; i++) a[i] = activation(kind, a[i]);
    store(a, y + at, 0);
}

// In place: the gradient of the result becomes that of x.
KERNEL activate_backward(const X* x, X* gradient, u64 packs, int kind) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P], g[P];
    load(x + at, a);
    load(gradient + at, g);
    for (int i = 0; i < P; i++) g[i] *= activation_slope(kind, a[i]);
    store(g, gradient + at, 0);
}
