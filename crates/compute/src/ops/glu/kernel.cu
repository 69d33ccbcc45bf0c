// Gated linear units, a thread for every P elements.

KERNEL glu(const X* gate, const X* up, X* y, u64 packs, int kind) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float g[P], u[P];
    load(gate + at, g);
    load(up + at, u);
    for (int i = 0; i < P; i++) g[i] = activation(kind, g[i]) * u[i];
    store(g, y + at, 0);
}

// The gradient of up, if it has a place; and if up is given, the gradient of the result becomes that of
// the gate, in place.
KERNEL glu_backward(const X* gate, const X* up, X* gradient, Y* out, u64 packs, int kind, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float g[P], u[P], d[P], slopes[P];
    load(gate + at, g);
    load(gradient + at, d);
    for (int i = 0; i < P; i++) activation_and_slope(kind, g[i], g[i], slopes[i]);
    if (out) {
        for (int i = 0; i < P; i++) g[i] *= d[i];
        store(g, out + at, add);
    }
    if (!up) return;
    load(up + at, u);
    for (int i = 0; i < P; i++) d[i] *= slopes[i] * u[i];
    store(d, gradient + at, 0);
}
