// What all of attention's kernels are told of its sizes, and which keys a query sees. Their texts begin with
// this.

struct Shape {
    u64 queries, keys, heads, kv_heads, d;
    float scale;
    int is_causal;
    const u32* lengths;
    const float* relative;
};

#define SHAPE_PARAMETERS                                                                            \
    u64 queries, u64 keys, u64 heads, u64 kv_heads, u64 d, float scale, int is_causal,              \
        const u32 *lengths, const float *relative
#define SHAPE {queries, keys, heads, kv_heads, d, scale, is_causal, lengths, relative}

// How many of the first keys a query sees.
DEVICE u64 seen(const Shape& s, u64 sample, u64 query) {
    u64 length = s.lengths ? s.lengths[sample] : s.keys;
    if (!s.is_causal) return length;
    u64 own = s.keys - s.queries + query + 1;
    return own < length ? own : length;
}

// What is added to scale * q * k; nothing for a query or a key that is not there.
DEVICE float bias(const Shape& s, u64 head, u64 query, u64 key) {
    if (!s.relative || query >= s.queries || key >= s.keys) return 0.0f;
    return s.relative[head * (s.queries + s.keys - 1) + s.queries - 1 - query + key];
}

