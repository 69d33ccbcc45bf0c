// What all of attention's kernels are told of its sizes, and which keys a query sees. Their texts begin with
// this.

struct Shape {
    u64 queries, keys, heads, kv_heads, d;
    float scale;
    int is_causal;
    const u32 *lengths, *first_keys;
    const float* relative;
};

#define SHAPE_PARAMETERS                                                                            \
    u64 queries, u64 keys, u64 heads, u64 kv_heads, u64 d, float scale, int is_causal,              \
        const u32 *lengths, const u32 *first_keys, const float *relative
#define SHAPE {queries, keys, heads, kv_heads, d, scale, is_causal, lengths, first_keys, relative}

// How many of the first keys a query sees.
DEVICE u64 seen(const Shape& s, u64 sample, u64 query) {
    u64 length = s.lengths ? s.lengths[sample] : s.keys;
    if (!s.is_causal) return length;
    u64 own = s.keys - s.queries + query + 1;
    return own < length ? own : length;
}

// The first key that a query sees, if it sees any.
DEVICE u32 first_key(const Shape& s, u64 sample, u64 query) {
    return s.first_keys ? s.first_keys[sample * s.queries + query] : 0;
}

// The first key that any of some queries sees. All lanes of a warp ask together.
DEVICE u32 first_of(const Shape& s, u64 sample, u64 query, u64 count) {
    if (!s.first_keys) return 0;
    u32 first = s.keys;
    for (u64 i = lane(); i < count; i += 32) {
        u32 own = first_key(s, sample, query + i);
        first = own < first ? own : first;
    }
    return __reduce_min_sync(~0u, first);
}

// What is added to scale * q * k; nothing for a query or a key that is not there.
DEVICE float bias(const Shape& s, u64 head, u64 query, u64 key) {
    if (!s.relative || query >= s.queries || key >= s.keys) return 0.0f;
    return s.relative[head * (s.queries + s.keys - 1) + s.queries - 1 - query + key];
}

