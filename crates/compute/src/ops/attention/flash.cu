// Attention for heads of up to D = 64 or 128 numbers of 16 bits, by the tensor cores (mma.sync m16n8k16), after
// Dao, "FlashAttention-2", arXiv 2307.08691. Layouts are those of `kernel.cu`; d is a multiple of 8.
//
// A block has 4 warps; a warp has one or two bands of 16 rows of queries, or of keys where gradients of keys
// are found, and meets the others a tile at a time. Tiles come to shared memory by cp.async, one ahead of the
// one at work. Scores stay in registers: a warp's weights are the left operands of its next matmul as they are.
//
// A thread g, t (its lane is 4 * g + t) has of a 16 by 8 tile of sums four numbers c: two at row g, columns
// 2 * t and 2 * t + 1, and two at row g + 8.

#define WARPS 4
#define LOG2_E 1.44269504f
#define LN_2 0.69314718f
// Rows of a tile.
#define TILE 64
// Bands of a warp, and of how many of a tile's rows scores are found before they are used: as many as
// registers allow. Measured on an H200, 2026-11-16, B1 H24 N4352, heads of 64 and of 128: forward 263 and 304
// TFLOP/s, backward 231 and 238. With one band forward has 245 and 299, gradients of heads of 64 take 1.04 of
// the time; with tiles of 32 rows all take 1.06 to 1.1.
#define FORWARD_BANDS 2
#define BACKWARD_BANDS (D == 64 ? 2 : 1)
#define DQ_SLICE 32
#define DKV_SLICE (32 / BACKWARD_BANDS)

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

DEVICE u32 shared_address(const void* at) {
    u32 address;
    asm("{ .reg .u64 a; cvta.to.shared.u64 a, %1; cvt.u32.u64 %0, a; }" : "=r"(address) : "l"(at));
    return address;
}

// The same number, but found anew at every turn of a loop: what follows from it shall not wait in registers.
DEVICE u32 anew(u32 x) {
    asm volatile("" : "+r"(x));
    return x;
}

// Where 8 numbers of a tile's row lie: turned by the row, so that 8 rows are read without conflict.
DEVICE u32 place(u32 row, u32 eighth) { return row * (D * 2) + (eighth ^ (row & 7)) * 16; }

// A place of a tile, two eighths further for each step.
DEVICE u32 stepped(u32 at, int step) { return at ^ (step * 32); }

// Starts to copy 4 or 16 bytes; what is not there becomes zeros.
template <int BYTES> DEVICE void copy(u32 to, const void* from, bool is_there) {
    u32 bytes = is_there ? BYTES : 0;
    if (BYTES == 16) {
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes));
    } else {
        asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(to), "l"(from), "r"(bytes));
    }
}

// Starts to copy N rows of a head, of which so many are there, of d numbers each.
template <int N> DEVICE void fetch(u32 tile, const X* from, u64 row_width, u32 d, u32 count) {
    constexpr int AT_ONCE = 32 * WARPS / (D / 8);
    u32 row = threadIdx.x / (D / 8), eighth = threadIdx.x % (D / 8), to = tile + place(row, eighth);
    const X* at = from + row * row_width + eighth * 8;
    if (eighth * 8 >= d) count = 0;
#pragma unroll
    for (int i = 0; i < N; i += AT_ONCE) {
        copy<16>(to + i * D * 2, at, row + i < count);
        at += AT_ONCE * row_width;
    }
}

// What was fetched is there for all, and nobody needs what lies where the next will.
DEVICE void await() {
    asm volatile("cp.async.wait_all;");
    __syncthreads();
}

struct Left { u32 r[4]; };
struct Sums { float c[4]; };

DEVICE void load_matrices(u32 at, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}
DEVICE void load_transposed(u32 at, u32 (&r)[4]) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3]) : "r"(at));
}

// A warp's rows as left operands, 16 numbers of a row at each step: kept in registers, or read when needed.
template <int BANDS, bool IS_KEPT> struct Rows {
    Left kept[IS_KEPT ? D / 16 : 1][BANDS];
    u32 at;

    DEVICE Rows(u32 tile, u32 first) : at(tile + place(first + lane() % 16, lane() / 16)) {
#pragma unroll
        for (int step = 0; step < (IS_KEPT ? D / 16 : 0); step++) read(step, kept[step]);
    }
    DEVICE void read(int step, Left (&left)[BANDS]) const {
#pragma unroll
        for (int i = 0; i < BANDS; i++) load_matrices(stepped(at, step) + i * 16 * D * 2, left[i].r);
    }
    DEVICE void get(int step, Left (&left)[BANDS]) const {
        if (!IS_KEPT) read(step, left);
#pragma unroll
        for (int i = 0; i < (IS_KEPT ? BANDS : 0); i++) left[i] = kept[step][i];
    }
};

// X is called in instructions as it is here.
#define TEXT_OF(x) #x
#define TEXT(x) TEXT_OF(x)

DEVICE void mma(Sums& s, const Left& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32." TEXT(X) "." TEXT(X) ".f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(s.c[0]), "+f"(s.c[1]), "+f"(s.c[2]), "+f"(s.c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

DEVICE u32 pair(float low, float high) {
    u32 both;
    asm("cvt.rn." TEXT(X) "x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Scores of a warp's rows with N rows of a tile.
template <int BANDS, int N, bool IS_KEPT>
DEVICE void scores(Sums (&sums)[BANDS][N / 8], const Rows<BANDS, IS_KEPT>& rows, u32 tile) {
    // 16 rows are two right operands, of 8 columns each: rows become columns.
    u32 at = tile + place(lane() % 8 + lane() / 16 * 8, lane() / 8 % 2);
#pragma unroll
    for (int i = 0; i < BANDS * (N / 8); i++) sums[i % BANDS][i / BANDS] = {};
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
        Left left[BANDS];
        rows.get(step, left);
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            u32 r[4];
            load_matrices(stepped(at, step) + i * 16 * D * 2, r);
#pragma unroll
            for (int band = 0; band < BANDS; band++) {
                mma(sums[band][2 * i], left[band], r[0], r[1]);
                mma(sums[band][2 * i + 1], left[band], r[2], r[3]);
            }
        }
    }
}

// Adds N rows of a tile, each by its weight; the weights are rounded.
template <int BANDS, int N>
DEVICE void weigh(Sums (&sums)[BANDS][D / 8], const Sums (&weights)[BANDS][N / 8], u32 tile) {
    u32 at = tile + place(lane() % 16, lane() / 16);
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        Left left[BANDS];
#pragma unroll
        for (int band = 0; band < BANDS; band++) {
            const float *a = weights[band][2 * i].c, *b = weights[band][2 * i + 1].c;
            left[band] = {{pair(a[0], a[1]), pair(a[2], a[3]), pair(b[0], b[1]), pair(b[2], b[3])}};
        }
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            u32 r[4];
            load_transposed(stepped(at, j) + i * 16 * D * 2, r);
#pragma unroll
            for (int band = 0; band < BANDS; band++) {
                mma(sums[band][2 * j], left[band], r[0], r[1]);
                mma(sums[band][2 * j + 1], left[band], r[2], r[3]);
            }
        }
    }
}

// Writes or adds a warp's sums to rows of a head, times a factor.
template <int BANDS>
DEVICE void put_rows(const Sums (&sums)[BANDS][D / 8], X* to, u64 row_width, u32 d, u32 first, u32 count,
                     float factor, int add) {
#pragma unroll
    for (int half = 0; half < 2 * BANDS; half++) {
        u32 row = first + lane() / 4 + 8 * half;
        if (row >= count) continue;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            if (8 * i >= d) break;
            u32* at = (u32*)(to + row * row_width + 8 * i + 2 * (lane() % 4));
            const float* c = &sums[half / 2][i].c[half % 2 * 2];
            float a = c[0] * factor, b = c[1] * factor;
            if (add) {
                X low, high;
                u32 before = *at;
                low.bits = before;
                high.bits = before >> 16;
                a += to_f32(low);
                b += to_f32(high);
            }
            *at = pair(a, b);
        }
    }
}

// Does something with every number of a warp's sums: its band, its 8 columns, and which of a thread's four.
template <int BANDS, int N, class Act> DEVICE void each(Act act) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int j = 0; j < 4 * BANDS; j++) act(j / 4, i, j % 4);
    }
}

// Over the four threads that have parts of a row.
DEVICE float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
DEVICE float quad_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A block's queries of a head, and the keys that any of them sees.
struct Queries {
    u32 sample, head, first, count, begin, end;
    u64 row_width, kv_width, own, others;

    // The last are taken first, since they may see the most.
    DEVICE Queries(const Shape& s, u32 rows)
        : sample(blockIdx.z), head(blockIdx.y), first((gridDim.x - 1 - blockIdx.x) * rows),
          count(s.queries - first < rows ? s.queries - first : rows), row_width(s.heads * s.d),
          kv_width(s.kv_heads * s.d) {
        begin = firsts_of(s, sample, first, count).least;
        end = seen(s, sample, first + count - 1);
        own = (sample * s.queries + first) * row_width + head * s.d;
        others = sample * s.keys * kv_width + head / (u32)(s.heads / s.kv_heads) * s.d;
    }
    // Starts to copy a tile of keys, and one of values behind it.
    template <int N> DEVICE void meet(const Shape& s, const X* k, const X* v, u32 key, u32 tile) const {
        u64 at = others + key * kv_width;
        fetch<N>(tile, k + at, kv_width, s.d, s.keys - key);
        fetch<N>(tile + N * D * 2, v + at, kv_width, s.d, s.keys - key);
    }
};

// The keys that all of a warp's queries see, with nothing added to their scores.
struct Whole {
    u32 from, to;

    DEVICE Whole(const Shape& s, u32 sample, u32 query, u32 count) {
        u32 rest = query < s.queries ? s.queries - query : 0;
        from = s.relative ? ~0u : firsts_of(s, sample, query, rest < count ? rest : count).most;
        to = seen(s, sample, query);
    }
    DEVICE bool has(u32 key, u32 count) const { return key >= from && key + count <= to; }
};

// Scores of a warp's queries and N keys as exponents of two; no weight for a key that is not seen.
template <int BANDS, int N>
DEVICE void mask(Sums (&sums)[BANDS][N / 8], const Shape& s, const Queries& of, u32 query, u32 key) {
#pragma unroll
    for (int half = 0; half < 2 * BANDS; half++) {
        u32 own = anew(query + lane() / 4 + 8 * half), last = s.queries - 1;
        own = own < last ? own : last;
        u32 from = first_key(s, of.sample, own), sees = seen(s, of.sample, own);
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            u32 at = key + i / 2 * 8 + lane() % 4 * 2 + i % 2;
            float& x = sums[half / 2][i / 2].c[half % 2 * 2 + i % 2];
            x = at >= from && at < sees ? x * s.scale * LOG2_E : -INFINITY;
        }
        if (!s.relative) continue;
#pragma unroll
        for (int i = 0; i < N / 4; i++) {
            u32 at = key + i / 2 * 8 + lane() % 4 * 2 + i % 2;
            sums[half / 2][i / 2].c[half % 2 * 2 + i % 2] += LOG2_E * bias(s, of.head, own, at);
        }
    }
}

// One step of a softmax: exponents, in some unit, become weights relative to the largest so far, and what was
// summed up before is made relative to it too.
template <int BANDS, int N>
DEVICE void soften(Sums (&weights)[BANDS][N / 8], float unit, float (&most)[2 * BANDS],
                   float (&total)[2 * BANDS], Sums (&sums)[BANDS][D / 8]) {
#pragma unroll
    for (int half = 0; half < 2 * BANDS; half++) {
        Sums(&band)[N / 8] = weights[half / 2];
        int c = half % 2 * 2;
        float now = -INFINITY;
#pragma unroll
        for (int i = 0; i < N / 8; i++) now = fmaxf(now, fmaxf(band[i].c[c], band[i].c[c + 1]));
        now = fmaxf(most[half], quad_max(now) * unit);
        float center = now == -INFINITY ? 0.0f : now, old = exp2_fast(most[half] - center);
        most[half] = now;
        total[half] *= old;
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
            band[i].c[c] = exp2_fast(band[i].c[c] * unit - center);
            band[i].c[c + 1] = exp2_fast(band[i].c[c + 1] * unit - center);
            total[half] += band[i].c[c] + band[i].c[c + 1];
        }
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            sums[half / 2][i].c[c] *= old;
            sums[half / 2][i].c[c + 1] *= old;
        }
    }
}

extern __shared__ __align__(1024) u8 shared[];

// A block for each 64 queries of a band, head and sample. Shared memory: the queries, then two tiles of keys
// and of values.
KERNEL flash(const X* q, const X* k, const X* v, X* out, float* statistics, SHAPE_PARAMETERS) {
    constexpr int BANDS = FORWARD_BANDS, N = TILE, ROWS = 16 * BANDS * WARPS;
    constexpr u32 BYTES = N * D * 2;
    Shape s = SHAPE;
    Queries of(s, ROWS);
    u32 base = shared_address(shared), tiles = base + ROWS * D * 2;
    u32 warp_row = threadIdx.x / 32 * 16 * BANDS, query = of.first + warp_row;
    Whole whole(s, of.sample, query, 16 * BANDS);
    fetch<ROWS>(base, q + of.own, of.row_width, d, of.count);
    Rows<BANDS, false> rows(base, warp_row);
    Sums sums[BANDS][D / 8] = {};
    float most[2 * BANDS], total[2 * BANDS] = {};
    for (int half = 0; half < 2 * BANDS; half++) most[half] = -INFINITY;
    if (of.begin < of.end) of.meet<N>(s, k, v, of.begin, tiles);
    for (u32 key = of.begin, stage = 0; key < of.end; key += N, stage ^= 1) {
        u32 here = tiles + stage * 2 * BYTES;
        await();
        if (key + N < of.end) of.meet<N>(s, k, v, key + N, tiles + (stage ^ 1) * 2 * BYTES);
        Sums weights[BANDS][N / 8];
        scores<BANDS, N>(weights, rows, here);
        float unit = scale * LOG2_E;
        if (!whole.has(key, N)) {
            mask<BANDS, N>(weights, s, of, query, key);
            unit = 1.0f;
        }
        soften<BANDS, N>(weights, unit, most, total, sums);
        weigh<BANDS, N>(sums, weights, here + BYTES);
    }
#pragma unroll
    for (int half = 0; half < 2 * BANDS; half++) {
        u32 own = query + lane() / 4 + 8 * half;
        float all = quad_sum(total[half]);
        // One that sees nothing has no weights at all.
        float inverse = all == 0.0f ? 0.0f : 1.0f / all;
        float logarithm = all == 0.0f ? INFINITY : (most[half] + log2f(all)) * LN_2;
#pragma unroll
        for (int i = 0; i < D / 4; i++) sums[half / 2][i / 2].c[half % 2 * 2 + i % 2] *= inverse;
        if (lane() % 4 == 0 && own < queries) {
            statistics[(of.sample * heads + of.head) * queries + own] = logarithm;
        }
    }
    put_rows(sums, out + of.own, of.row_width, d, warp_row, of.count, 1.0f, 0);
}

// A block for each 64 queries of a band, head and sample. Shared memory: two tiles of keys and of values;
// queries and their gradients pass through it first.
KERNEL flash_dq(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                const float* delta, X* dq, int add, SHAPE_PARAMETERS) {
    constexpr int BANDS = BACKWARD_BANDS, N = TILE, SLICE = DQ_SLICE, ROWS = 16 * BANDS * WARPS;
    constexpr u32 BYTES = N * D * 2;
    Shape s = SHAPE;
    Queries of(s, ROWS);
    u32 tiles = shared_address(shared), warp_row = threadIdx.x / 32 * 16 * BANDS, query = of.first + warp_row;
    Whole whole(s, of.sample, query, 16 * BANDS);
    fetch<ROWS>(tiles, q + of.own, of.row_width, d, of.count);
    fetch<ROWS>(tiles + ROWS * D * 2, dout + of.own, of.row_width, d, of.count);
    await();
    Rows<BANDS, true> rows(tiles, warp_row), gradients(tiles + ROWS * D * 2, warp_row);
    __syncthreads();
    Sums sums[BANDS][D / 8] = {};
    float logarithm[2 * BANDS], own_delta[2 * BANDS];
    for (int half = 0; half < 2 * BANDS; half++) {
        u32 own = query + lane() / 4 + 8 * half;
        u64 at = (of.sample * heads + of.head) * queries + own;
        logarithm[half] = own < queries ? statistics[at] * LOG2_E : INFINITY;
        own_delta[half] = own < queries ? delta[at] : 0.0f;
    }
    if (of.begin < of.end) of.meet<N>(s, k, v, of.begin, tiles);
    for (u32 key = of.begin, stage = 0; key < of.end; key += N, stage ^= 1) {
        u32 here = tiles + stage * 2 * BYTES;
        await();
        if (key + N < of.end) of.meet<N>(s, k, v, key + N, tiles + (stage ^ 1) * 2 * BYTES);
#pragma unroll 1
        for (u32 slice = 0; slice < N; slice += SLICE) {
            u32 at = here + slice * D * 2;
            Sums weights[BANDS][SLICE / 8], slopes[BANDS][SLICE / 8];
            scores<BANDS, SLICE>(weights, rows, at);
            scores<BANDS, SLICE>(slopes, gradients, at + BYTES);
            float unit = scale * LOG2_E;
            if (!whole.has(key + slice, SLICE)) {
                mask<BANDS, SLICE>(weights, s, of, query, key + slice);
                unit = 1.0f;
            }
            each<BANDS, SLICE>([&](int band, int i, int c) {
                int half = 2 * band + c / 2;
                float weight = exp2_fast(weights[band][i].c[c] * unit - logarithm[half]);
                slopes[band][i].c[c] = weight * (slopes[band][i].c[c] - own_delta[half]);
            });
            weigh<BANDS, SLICE>(sums, slopes, at);
        }
    }
    put_rows(sums, dq + of.own, of.row_width, d, warp_row, of.count, scale, add);
}

// What is known of a query: the logarithm of its denominator, delta, and the first key that it sees.
struct alignas(16) Known { float logarithm, delta; u32 first_key; };

// A block's keys, and the queries that see any of them.
struct Keys {
    u32 sample, kv_head, first, count, length, begin, end;
    u64 row_width, kv_width, own;

    // Queries are met in tiles of n.
    DEVICE Keys(const Shape& s, u32 rows, u32 n)
        : sample(blockIdx.z), kv_head(blockIdx.y), first(blockIdx.x * rows),
          count(s.keys - first < rows ? s.keys - first : rows), length(length_of(s, sample)), begin(0),
          end(s.queries), row_width(s.heads * s.d), kv_width(s.kv_heads * s.d) {
        own = (sample * s.keys + first) * kv_width + kv_head * s.d;
        // Later queries see more,
        while (begin < end) {
            u32 last = begin + n < end ? begin + n - 1 : end - 1;
            if (seen_of(s, length, last) > first) break;
            begin += n;
        }
        // but not those whose documents begin later.
        while (s.first_keys && end > begin) {
            u32 tile = (end - 1) / n * n;
            if (firsts_of(s, sample, tile, end - tile).least < first + count) break;
            end = tile;
        }
    }
    // Starts to copy a tile of queries, one of gradients behind it, and what is known of them.
    template <int N> DEVICE void meet(const Shape& s, const X* q, const X* dout, const float* statistics,
                                      const float* delta, u32 head, u32 query, u32 tile, u32 known) const {
        u32 rest = s.queries - query, i = threadIdx.x;
        u64 at = (sample * s.queries + query) * row_width + head * s.d;
        fetch<N>(tile, q + at, row_width, s.d, rest);
        fetch<N>(tile + N * D * 2, dout + at, row_width, s.d, rest);
        if (i >= N) return;
        u64 row = (sample * s.heads + head) * s.queries + query + i;
        known += i * sizeof(Known);
        copy<4>(known, statistics + row, i < rest);
        copy<4>(known + 4, delta + row, i < rest);
        if (s.first_keys) copy<4>(known + 8, s.first_keys + sample * s.queries + query + i, i < rest);
    }
};

// As above, for a warp's keys and N queries of which something is known.
template <int BANDS, int N>
DEVICE void mask(Sums (&sums)[BANDS][N / 8], const Shape& s, const Keys& of, u32 head, u32 key, u32 query,
                 const Known* known) {
    key = anew(key + lane() / 4);
    query += lane() % 4 * 2;
    each<BANDS, N>([&](int band, int i, int c) {
        u32 own = key + 16 * band + c / 2 * 8, column = 8 * i + c % 2;
        u32 from = s.first_keys ? known[lane() % 4 * 2 + column].first_key : 0;
        bool is_seen = own >= from && own < seen_of(s, of.length, query + column);
        sums[band][i].c[c] = is_seen ? sums[band][i].c[c] * s.scale * LOG2_E : -INFINITY;
    });
    if (!s.relative) return;
    each<BANDS, N>([&](int band, int i, int c) {
        sums[band][i].c[c] += LOG2_E * bias(s, head, query + 8 * i + c % 2, key + 16 * band + c / 2 * 8);
    });
}

// A block for each 64 keys of a band, head of keys and sample. Shared memory: two tiles of queries and of
// their gradients, through which keys and values pass first, then what is known of the queries.
KERNEL flash_dkv(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                 const float* delta, X* dk, X* dv, int add_k, int add_v, SHAPE_PARAMETERS) {
    constexpr int BANDS = BACKWARD_BANDS, N = TILE, SLICE = DKV_SLICE, ROWS = 16 * BANDS * WARPS;
    constexpr u32 BYTES = N * D * 2;
    Shape s = SHAPE;
    Keys of(s, ROWS, N);
    u32 tiles = shared_address(shared), warp_row = threadIdx.x / 32 * 16 * BANDS;
    const Known* known = (const Known*)(shared + 4 * BYTES);
    fetch<ROWS>(tiles, k + of.own, of.kv_width, d, of.count);
    fetch<ROWS>(tiles + ROWS * D * 2, v + of.own, of.kv_width, d, of.count);
    await();
    Rows<BANDS, true> rows(tiles, warp_row), values(tiles + ROWS * D * 2, warp_row);
    __syncthreads();
    auto start = [&](u32 head, u32 query, u32 stage) {
        u32 of_known = tiles + 4 * BYTES + stage * N * sizeof(Known);
        of.meet<N>(s, q, dout, statistics, delta, head, query, tiles + stage * 2 * BYTES, of_known);
    };
    Sums k_sums[BANDS][D / 8] = {}, v_sums[BANDS][D / 8] = {};
    u32 group = heads / kv_heads, head = of.kv_head * group, query = of.begin;
    u32 last_head = of.begin < of.end ? head + group : head;
    if (head < last_head) start(head, query, 0);
    for (u32 stage = 0; head < last_head; stage ^= 1) {
        bool is_last = query + N >= of.end;
        u32 next = is_last ? of.begin : query + N, next_head = head + is_last;
        await();
        if (next_head < last_head) start(next_head, next, stage ^ 1);
        // A query or a key that is not there is zeros, and gives none.
        bool is_whole = !relative && seen_of(s, of.length, query) >= of.first + of.count;
        for (u32 i = lane(); first_keys && i < N; i += 32) {
            is_whole &= known[stage * N + i].first_key <= of.first;
        }
        is_whole = __all_sync(~0u, is_whole);
#pragma unroll 1
        for (u32 slice = 0; slice < N; slice += SLICE) {
            u32 at = tiles + stage * 2 * BYTES + slice * D * 2;
            const Known* others = known + stage * N + slice;
            Sums weights[BANDS][SLICE / 8], slopes[BANDS][SLICE / 8];
            scores<BANDS, SLICE>(weights, rows, at);
            scores<BANDS, SLICE>(slopes, values, at + BYTES);
            float unit = scale * LOG2_E;
            if (!is_whole) {
                mask<BANDS, SLICE>(weights, s, of, head, of.first + warp_row, query + slice, others);
                unit = 1.0f;
            }
            each<BANDS, SLICE>([&](int band, int i, int c) {
                float &weight = weights[band][i].c[c], &slope = slopes[band][i].c[c];
                Known other = others[8 * i + lane() % 4 * 2 + c % 2];
                weight = exp2_fast(weight * unit - other.logarithm * LOG2_E);
                slope = weight * (slope - other.delta);
            });
            weigh<BANDS, SLICE>(v_sums, weights, at + BYTES);
            weigh<BANDS, SLICE>(k_sums, slopes, at);
        }
        query = next;
        head = next_head;
    }
    put_rows(k_sums, dk + of.own, of.kv_width, d, warp_row, of.count, scale, add_k);
    put_rows(v_sums, dv + of.own, of.kv_width, d, warp_row, of.count, 1.0f, add_v);
}
