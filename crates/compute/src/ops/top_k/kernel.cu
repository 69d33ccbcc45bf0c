// The largest keys, a thread for each key: it counts those before its own.

// The order of integers is that of the numbers, with NaN at the ends.
DEVICE int order(X key) {
    int bits = __float_as_int(to_f32(key));
    return bits < 0 ? bits ^ 0x7fffffff : bits;
}

KERNEL top_k(const X* keys, u32* ids, u64 all, u64 n, u64 k) {
    u64 at = thread();
    if (at >= all) return;
    u64 row = at / n, own = at % n, rank = 0;
    int key = order(keys[at]);
    for (u64 i = 0; i < n; i++) {
        int other = order(keys[row * n + i]);
        rank += other > key || (other == key && i < own);
    }
    if (rank < k) ids[row * k + rank] = (u32)own;
}
