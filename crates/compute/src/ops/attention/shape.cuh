// The sizes that all attention kernels get, and which keys a query sees. Their sources begin with this.

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

// Keys of a sample.
DEVICE u32 length_of(const Shape& s, u64 sample) { return s.lengths ? s.lengths[sample] : s.keys; }

// How many of the first keys a query sees, of so many that there are.
DEVICE u32 seen_of(const Shape& s, u32 length, u64 query) {
    u32 own = s.keys - s.queries + query + 1;
    return s.is_causal && own < length ? own : length;
}
DEVICE u32 seen(const Shape& s, u64 sample, u64 query) { return seen_of(s, length_of(s, sample), query); }

// The first key that a query sees, if it sees any.
DEVICE u32 first_key(const Shape& s, u64 sample, u64 query) {
    return s.first_keys ? s.first_keys[sample * s.queries + query] : 0;
}

// The least and the most of some queries' first keys. All lanes of a warp ask together.
struct Firsts { u32 least, most; };
DEVICE Firsts firsts_of(const Shape& s, u64 sample, u64 query, u64 count) {
    if (!s.first_keys) return {0, 0};
    Firsts firsts = {(u32)s.keys, 0};
    for (u64 i = lane(); i < count; i += 32) {
        u32 own = first_key(s, sample, query + i);
        firsts.least = own < firsts.least ? own : firsts.least;
        firsts.most = own > firsts.most ? own : firsts.most;
    }
    return {__reduce_min_sync(~0u, firsts.least), __reduce_max_sync(~0u, firsts.most)};
}

// What is added to scale * q * k; nothing for a query or a key that is not there.
DEVICE float bias(const Shape& s, u64 head, u64 query, u64 key) {
    if (!s.relative || query >= s.queries || key >= s.keys) return 0.0f;
    return s.relative[head * (s.queries + s.keys - 1) + s.queries - 1 - query + key];
}

