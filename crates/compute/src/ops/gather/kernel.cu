// Tokens by index, a thread for every P elements of what is written.

KERNEL gather(const X* x, const u32* ids, Y* y, u64 packs, u64 width, u64 n, u64 n_tokens, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    u64 row = at / width, column = at % width;
    float a[P];
    load(x + (row / n * n_tokens + ids[row]) * width + column, a);
    store(a, y + at, add);
}

// A place finds what lands on it in the sorted order of the indices, and sums it up in that order.
KERNEL scatter(const X* x, const u32* ids, const u32* order, Y* y, u64 packs, u64 width, u64 n,
               u64 n_tokens, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    u64 row = at / width, column = at % width, sample = row / n_tokens, place = row % n_tokens;
    ids += sample * n;
    order += sample * n;
    x += sample * n * width + column;
    u64 low = 0, high = n;
    while (low < high) {
        u64 middle = (low + high) / 2;
        if (ids[order[middle]] < place) low = middle + 1; else high = middle;
    }
    float sum[P] = {};
    int any = 0;
    for (; low < n && ids[order[low]] == place; low++) {
        float a[P];
        load(x + (u64)order[low] * width, a);
        for (int i = 0; i < P; i++) sum[i] += a[i];
        any = 1;
    }
    if (any || !add) store(sum, y + at, add);
}
