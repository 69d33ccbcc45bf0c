// Tokens copied or added, a thread for every P elements of the span.

KERNEL copy_tokens(const X* from, Y* to, u64 packs, u64 width, u64 count, u64 n_from, u64 n_to,
                   u64 first_from, u64 first_to, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    u64 column = at % width, token = at / width % count, sample = at / width / count;
    float a[P];
    load(from + (sample * n_from + first_from + token) * width + column, a);
    store(a, to + (sample * n_to + first_to + token) * width + column, add);
}
