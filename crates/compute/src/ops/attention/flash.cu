// Attention for heads of D = 64 or 128 numbers of 16 bits, by the matrix units (mma.sync m16n8k16), after
// Dao, "FlashAttention-2", arXiv 2307.08691. Layouts are those of `kernel.cu`.
//
// A block has 4 warps; a warp has 16 rows of queries, or of keys where gradients of keys are found, and
// meets the others a tile at a time. Tiles come to shared memory by cp.async, one ahead of the one at work.
// Products stay in registers: a warp's weights are left factors of its next product as they lie.
//
// A thread g, t (its lane is 4 * g + t) has of a 16 by 8 tile of sums the numbers at rows g and g + 8, columns
// 2 * t and 2 * t + 1.

#define WARPS 4
#define ROWS (16 * WARPS)
#define LOG2_E 1.44269504f
#define LN_2 0.69314718f
// Rows of what is met at a time: gradients leave less room in registers. Measured on an H200, 2026-11-16, B1
// H24 N4352 d64 and N4608 d128: forward 213 and 236 TFLOP/s, backward 159 and 164; with 8 warps 132 and 146.
#define FORWARD_TILE 64
#define BACKWARD_TILE (D == 64 ? 64 : 32)

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

// Where 8 numbers of a tile's row lie: turned by the row, so that 8 rows are read without conflict.
DEVICE u32 place(u32 tile, u32 row, u32 eighth) { return tile + (row * (D / 8) + (eighth ^ (row & 7))) * 16; }

// Starts to copy rows of a head; those that are not there become zeros.
template <int N> DEVICE void fetch(u32 tile, const X* from, u64 row_width, u64 count) {
#pragma unroll
    for (int i = threadIdx.x; i < N * (D / 8); i += 32 * WARPS) {
        u32 row = i / (D / 8), eighth = i % (D / 8), bytes = row < count ? 16 : 0;
        const X* at = from + (row < count ? row : 0) * row_width + eighth * 8;
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(place(tile, row, eighth)),
                     "l"(at), "r"(bytes));
    }
}

DEVICE void commit() { asm volatile("cp.async.commit_group;"); }
template <int N> DEVICE void await() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

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

// 16 rows and the 16 numbers from 16 * step on, as a left factor.
DEVICE void load_left(u32 tile, u32 first, int step, Left& left) {
    load_matrices(place(tile, first + lane() % 16, 2 * step + lane() / 16), left.r);
}

// The same of 16 rows as two right factors, of 8 columns each: rows become columns.
DEVICE void load_columns(u32 tile, u32 first, int step, u32 (&r)[4]) {
    load_matrices(place(tile, first + lane() % 8 + lane() / 16 * 8, 2 * step + lane() / 8 % 2), r);
}

// 16 rows as they are, of two eighths, as two right factors of 8 columns each.
DEVICE void load_rows(u32 tile, u32 first, int eighth, u32 (&r)[4]) {
    load_transposed(place(tile, first + lane() % 16, eighth + lane() / 16), r);
}

template <class T> DEVICE void mma(Sums& sums, const Left& a, u32 b0, u32 b1);
template <> DEVICE void mma<bf16>(Sums& s, const Left& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(s.c[0]), "+f"(s.c[1]), "+f"(s.c[2]), "+f"(s.c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}
template <> DEVICE void mma<f16>(Sums& s, const Left& a, u32 b0, u32 b1) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(s.c[0]), "+f"(s.c[1]), "+f"(s.c[2]), "+f"(s.c[3])
        : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b0), "r"(b1));
}

template <class T> DEVICE u32 pair(float low, float high);
template <> DEVICE u32 pair<bf16>(float low, float high) {
    u32 both;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}
template <> DEVICE u32 pair<f16>(float low, float high) {
    u32 both;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(both) : "f"(high), "f"(low));
    return both;
}

// Products of a warp's 16 rows with N rows of a tile.
template <int N> DEVICE void products(Sums (&sums)[N / 8], const Left (&left)[D / 16], u32 tile) {
#pragma unroll
    for (int i = 0; i < N / 8; i++) sums[i] = {};
#pragma unroll
    for (int step = 0; step < D / 16; step++) {
#pragma unroll
        for (int i = 0; i < N / 16; i++) {
            u32 r[4];
            load_columns(tile, 16 * i, step, r);
            mma<X>(sums[2 * i], left[step], r[0], r[1]);
            mma<X>(sums[2 * i + 1], left[step], r[2], r[3]);
        }
    }
}

// Adds weights [16, N] times N rows of a tile; the weights are rounded.
template <int N> DEVICE void weigh(Sums (&sums)[D / 8], const Sums (&weights)[N / 8], u32 tile) {
#pragma unroll
    for (int i = 0; i < N / 16; i++) {
        const float *a = weights[2 * i].c, *b = weights[2 * i + 1].c;
        Left left = {{pair<X>(a[0], a[1]), pair<X>(a[2], a[3]), pair<X>(b[0], b[1]), pair<X>(b[2], b[3])}};
#pragma unroll
        for (int j = 0; j < D / 16; j++) {
            u32 r[4];
            load_rows(tile, 16 * i, 2 * j, r);
            mma<X>(sums[2 * j], left, r[0], r[1]);
            mma<X>(sums[2 * j + 1], left, r[2], r[3]);
        }
    }
}

// Writes or adds a warp's sums to rows of a head, scaled row by row.
DEVICE void put_rows(const Sums (&sums)[D / 8], X* to, u64 row_width, u64 first, u64 count,
                     float factor_a, float factor_b, int add) {
    u32 g = lane() / 4, t = lane() % 4;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        u64 row = first + g + 8 * half;
        if (row >= count) continue;
        float factor = half ? factor_b : factor_a;
#pragma unroll
        for (int i = 0; i < D / 8; i++) {
            u32* at = (u32*)(to + row * row_width + 8 * i + 2 * t);
            float a = sums[i].c[2 * half] * factor, b = sums[i].c[2 * half + 1] * factor;
            if (add) {
                X low, high;
                u32 before = *at;
                low.bits = before;
                high.bits = before >> 16;
                a += to_f32(low);
                b += to_f32(high);
            }
            *at = pair<X>(a, b);
        }
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

extern __shared__ __align__(128) u8 shared[];

// A block for each 64 queries, head and sample. Shared memory: two tiles of k and of v; the queries pass
// through it first.
extern "C" __global__ void __launch_bounds__(32 * WARPS, D == 64 ? 3 : 2)
flash(const X* q, const X* k, const X* v, X* out, float* statistics, SHAPE_PARAMETERS) {
    constexpr int N = FORWARD_TILE;
    constexpr u32 TILE = N * D * 2;
    Shape s = SHAPE;
    u64 first = (u64)blockIdx.x * ROWS, head = blockIdx.y, sample = blockIdx.z;
    u64 kv_head = head / (heads / kv_heads), count = queries - first < ROWS ? queries - first : ROWS;
    u64 row_width = heads * d, kv_width = kv_heads * d, own = (sample * queries + first) * row_width + head * d;
    u32 base = shared_address(shared), warp_row = threadIdx.x / 32 * 16, g = lane() / 4, t = lane() % 4;
    Left left[D / 16];
    fetch<ROWS>(base, q + own, row_width, count);
    commit();
    await<0>();
    __syncthreads();
#pragma unroll
    for (int i = 0; i < D / 16; i++) load_left(base, warp_row, i, left[i]);
    __syncthreads();

    Sums sums[D / 8] = {};
    u64 query = first + warp_row + g;
    u32 from[2], sees[2];
    float most[2] = {-INFINITY, -INFINITY}, total[2] = {};
    for (int i = 0; i < 2; i++) {
        from[i] = query + 8 * i < queries ? first_key(s, sample, query + 8 * i) : 0;
        sees[i] = query + 8 * i < queries ? seen(s, sample, query + 8 * i) : 0;
    }
    u32 begin = first_of(s, sample, first, count), end = seen(s, sample, first + count - 1);
    const X *ks = k + sample * keys * kv_width + kv_head * d, *vs = v + sample * keys * kv_width + kv_head * d;
    float unit = scale * LOG2_E;
    if (begin < end) {
        fetch<N>(base, ks + begin * kv_width, kv_width, keys - begin);
        fetch<N>(base + TILE, vs + begin * kv_width, kv_width, keys - begin);
    }
    commit();
    for (u32 key = begin, stage = 0; key < end; key += N, stage ^= 1) {
        u32 here = base + stage * 2 * TILE, next = key + N;
        if (next < end) {
            u32 there = base + (stage ^ 1) * 2 * TILE;
            fetch<N>(there, ks + next * kv_width, kv_width, keys - next);
            fetch<N>(there + TILE, vs + next * kv_width, kv_width, keys - next);
        }
        commit();
        await<1>();
        __syncthreads();
        Sums weights[N / 8];
        products<N>(weights, left, here);
        bool is_whole = key >= from[0] && key >= from[1] && key + N <= sees[0] && key + N <= sees[1] && !relative;
        float now[2] = {most[0], most[1]};
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                float x = weights[i].c[j] * unit;
                if (!is_whole) {
                    u32 at = key + 8 * i + 2 * t + j % 2;
                    bool is_seen = at >= from[j / 2] && at < sees[j / 2];
                    x = is_seen ? x + LOG2_E * bias(s, head, query + j / 2 * 8, at) : -INFINITY;
                }
                weights[i].c[j] = x;
                now[j / 2] = fmaxf(now[j / 2], x);
            }
        }
#pragma unroll
        for (int half = 0; half < 2; half++) {
            now[half] = quad_max(now[half]);
            float center = now[half] == -INFINITY ? 0.0f : now[half];
            float old = exp2_fast(most[half] - center);
            most[half] = now[half];
            total[half] *= old;
#pragma unroll
            for (int i = 0; i < N / 8; i++) {
#pragma unroll
                for (int j = 2 * half; j < 2 * half + 2; j++) {
                    weights[i].c[j] = exp2_fast(weights[i].c[j] - center);
                    total[half] += weights[i].c[j];
                }
            }
#pragma unroll
            for (int i = 0; i < D / 8; i++) {
                sums[i].c[2 * half] *= old;
                sums[i].c[2 * half + 1] *= old;
            }
        }
        weigh<N>(sums, weights, here + TILE);
        __syncthreads();
    }
    float inverse[2];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        total[half] = quad_sum(total[half]);
        inverse[half] = total[half] == 0.0f ? 0.0f : 1.0f / total[half];
        if (t == 0 && query + 8 * half < queries) {
            statistics[(sample * heads + head) * queries + query + 8 * half] =
                (most[half] + log2f(total[half])) * LN_2;
        }
    }
    put_rows(sums, out + own, row_width, warp_row, count, inverse[0], inverse[1], 0);
}

// The slopes of scale * q * k, over scale: P * (dP - delta), where the products of q and k become P too.
template <int N> DEVICE void slope(float& weight, float& product, float unit, float logarithm, float delta,
                                   bool is_seen, float more) {
    weight = is_seen ? exp2_fast(weight * unit + more - logarithm) : 0.0f;
    product = weight * (product - delta);
}

// A block for each 64 queries, head and sample. Shared memory: queries and their gradients, then two
// tiles of k and of v.
KERNEL flash_dq(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                const float* delta, X* dq, int add, SHAPE_PARAMETERS) {
    constexpr int N = BACKWARD_TILE;
    constexpr u32 TILE = N * D * 2, OWN = ROWS * D * 2;
    Shape s = SHAPE;
    u64 first = (u64)blockIdx.x * ROWS, head = blockIdx.y, sample = blockIdx.z;
    u64 kv_head = head / (heads / kv_heads), count = queries - first < ROWS ? queries - first : ROWS;
    u64 row_width = heads * d, kv_width = kv_heads * d, own = (sample * queries + first) * row_width + head * d;
    u32 base = shared_address(shared), warp_row = threadIdx.x / 32 * 16, g = lane() / 4, t = lane() % 4;
    u32 tiles = base + 2 * OWN;
    fetch<ROWS>(base, q + own, row_width, count);
    fetch<ROWS>(base + OWN, dout + own, row_width, count);
    u32 begin = first_of(s, sample, first, count), end = seen(s, sample, first + count - 1);
    const X *ks = k + sample * keys * kv_width + kv_head * d, *vs = v + sample * keys * kv_width + kv_head * d;
    if (begin < end) {
        fetch<N>(tiles, ks + begin * kv_width, kv_width, keys - begin);
        fetch<N>(tiles + TILE, vs + begin * kv_width, kv_width, keys - begin);
    }
    commit();
    await<0>();
    __syncthreads();
    Left left[D / 16], gradient[D / 16];
#pragma unroll
    for (int i = 0; i < D / 16; i++) {
        load_left(base, warp_row, i, left[i]);
        load_left(base + OWN, warp_row, i, gradient[i]);
    }
    Sums sums[D / 8] = {};
    u64 query = first + warp_row + g;
    u32 from[2], sees[2];
    float logarithm[2], own_delta[2], unit = scale * LOG2_E;
    for (int i = 0; i < 2; i++) {
        bool is_there = query + 8 * i < queries;
        u64 at = (sample * heads + head) * queries + query + 8 * i;
        from[i] = is_there ? first_key(s, sample, query + 8 * i) : 0;
        sees[i] = is_there ? seen(s, sample, query + 8 * i) : 0;
        logarithm[i] = is_there ? statistics[at] * LOG2_E : 0.0f;
        own_delta[i] = is_there ? delta[at] : 0.0f;
    }
    for (u32 key = begin, stage = 0; key < end; key += N, stage ^= 1) {
        u32 here = tiles + stage * 2 * TILE, next = key + N;
        if (next < end) {
            u32 there = tiles + (stage ^ 1) * 2 * TILE;
            fetch<N>(there, ks + next * kv_width, kv_width, keys - next);
            fetch<N>(there + TILE, vs + next * kv_width, kv_width, keys - next);
        }
        commit();
        await<1>();
        __syncthreads();
        Sums weights[N / 8], slopes[N / 8];
        products<N>(weights, left, here);
        products<N>(slopes, gradient, here + TILE);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 at = key + 8 * i + 2 * t + j % 2;
                float more = relative ? LOG2_E * bias(s, head, query + j / 2 * 8, at) : 0.0f;
                slope<N>(weights[i].c[j], slopes[i].c[j], unit, logarithm[j / 2], own_delta[j / 2],
                         at >= from[j / 2] && at < sees[j / 2], more);
            }
        }
        weigh<N>(sums, slopes, here);
        __syncthreads();
    }
    put_rows(sums, dq + own, row_width, warp_row, count, scale, scale, add);
}

// A block for each 64 keys, head of keys and sample. Shared memory: keys and values, then two tiles of
// queries and of their gradients, and what is known of each query.
KERNEL flash_dkv(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                 const float* delta, X* dk, X* dv, int add_k, int add_v, SHAPE_PARAMETERS) {
    constexpr int N = BACKWARD_TILE;
    constexpr u32 TILE = N * D * 2, OWN = ROWS * D * 2;
    Shape s = SHAPE;
    __shared__ float logarithms[N], deltas[N];
    __shared__ u32 from[N], sees[N];
    u64 first = (u64)blockIdx.x * ROWS, kv_head = blockIdx.y, sample = blockIdx.z;
    u64 group = heads / kv_heads, count = keys - first < ROWS ? keys - first : ROWS;
    u64 row_width = heads * d, kv_width = kv_heads * d, own = (sample * keys + first) * kv_width + kv_head * d;
    u32 base = shared_address(shared), warp_row = threadIdx.x / 32 * 16, g = lane() / 4, t = lane() % 4;
    u32 tiles = base + 2 * OWN;
    u64 n_tiles = (queries + N - 1) / N;
    // The first tile of queries that sees any of these keys: later ones see more.
    u64 begin = 0;
    while (begin < n_tiles) {
        u64 last = begin * N + N - 1 < queries ? begin * N + N - 1 : queries - 1;
        if (seen(s, sample, last) > first) break;
        begin++;
    }
    // Nor do the last tiles, if their documents begin later.
    while (n_tiles > begin) {
        u64 query = (n_tiles - 1) * N, rest = queries - query;
        if (first_of(s, sample, query, rest < N ? rest : N) < first + count) break;
        n_tiles--;
    }
    u64 per_head = n_tiles - begin, all = per_head * group;
    auto start = [&](u64 index, u32 tile) {
        u64 head = kv_head * group + index / per_head, query = (begin + index % per_head) * N;
        u64 at = (sample * queries + query) * row_width + head * d;
        fetch<N>(tile, q + at, row_width, queries - query);
        fetch<N>(tile + TILE, dout + at, row_width, queries - query);
    };
    fetch<ROWS>(base, k + own, kv_width, count);
    fetch<ROWS>(base + OWN, v + own, kv_width, count);
    if (all) start(0, tiles);
    commit();
    await<0>();
    __syncthreads();
    Left left_k[D / 16], left_v[D / 16];
    if (D == 64) {
#pragma unroll
        for (int i = 0; i < D / 16; i++) {
            load_left(base, warp_row, i, left_k[i]);
            load_left(base + OWN, warp_row, i, left_v[i]);
        }
    }
    Sums k_sums[D / 8] = {}, v_sums[D / 8] = {};
    float unit = scale * LOG2_E;
    u32 key = first + warp_row + g;
    for (u64 index = 0; index < all; index++) {
        u32 stage = index & 1, here = tiles + stage * 2 * TILE;
        u64 head = kv_head * group + index / per_head, query = (begin + index % per_head) * N;
        if (index + 1 < all) start(index + 1, tiles + (stage ^ 1) * 2 * TILE);
        commit();
        if (threadIdx.x < N) {
            u64 at = query + threadIdx.x;
            bool is_there = at < queries;
            u64 row = (sample * heads + head) * queries + at;
            from[threadIdx.x] = is_there ? first_key(s, sample, at) : 0;
            sees[threadIdx.x] = is_there ? seen(s, sample, at) : 0;
            logarithms[threadIdx.x] = is_there ? statistics[row] * LOG2_E : 0.0f;
            deltas[threadIdx.x] = is_there ? delta[row] : 0.0f;
        }
        await<1>();
        __syncthreads();
        if (D != 64) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) load_left(base, warp_row, i, left_k[i]);
        }
        Sums weights[N / 8], slopes[N / 8];
        products<N>(weights, left_k, here);
        if (D != 64) {
#pragma unroll
            for (int i = 0; i < D / 16; i++) load_left(base + OWN, warp_row, i, left_v[i]);
        }
        products<N>(slopes, left_v, here + TILE);
#pragma unroll
        for (int i = 0; i < N / 8; i++) {
#pragma unroll
            for (int j = 0; j < 4; j++) {
                u32 column = 8 * i + 2 * t + j % 2, own_key = key + j / 2 * 8;
                float more = relative ? LOG2_E * bias(s, head, query + column, own_key) : 0.0f;
                slope<N>(weights[i].c[j], slopes[i].c[j], unit, logarithms[column], deltas[column],
                         own_key >= from[column] && own_key < sees[column], more);
            }
        }
        weigh<N>(v_sums, weights, here + TILE);
        weigh<N>(k_sums, slopes, here);
        __syncthreads();
    }
    put_rows(k_sums, dk + own, kv_width, warp_row, count, scale, scale, add_k);
    put_rows(v_sums, dv + own, kv_width, warp_row, count, 1.0f, 1.0f, add_v);
}
