// Attention for every width of a head and every dtype, in f32. Blocks of D queries meet blocks of D
// keys in shared memory; 256 threads share the rows evenly. Nothing is added up in an order that
// changes, so gradients of queries and of keys are found by kernels of their own.
//
// q, out and dout are [samples, queries, heads * d], k and v [samples, keys, kv_heads * d], statistics
// (the logarithm of each softmax's denominator, infinite where no key is seen) and delta (the sum of
// out * dout) [samples, heads, queries].

#define T D
#define PER_ROW (256 / T)

// Up to T rows of a head as f32; rows that are not there are zeros.
DEVICE void load_rows(const X* from, u64 row_width, u64 count, u64 d, float* to) {
    for (u64 i = threadIdx.x; i < T * d; i += 256) {
        u64 row = i / d, column = i % d;
        to[row * (d + 1) + column] = row < count ? to_f32(from[row * row_width + column]) : 0.0f;
    }
}

DEVICE void clear_rows(float* to, u64 d) {
    for (u64 i = threadIdx.x; i < T * (d + 1); i += 256) to[i] = 0.0f;
}

// scores[a][b] = sum of left[a] * right[b]
DEVICE void multiply(const float* left, const float* right, u64 d, float (*scores)[T + 1]) {
    u32 row = threadIdx.x / PER_ROW;
    for (u32 column = threadIdx.x % PER_ROW; column < T; column += PER_ROW) {
        float sum = 0.0f;
        for (u64 i = 0; i < d; i++) sum += left[row * (d + 1) + i] * right[column * (d + 1) + i];
        scores[row][column] = sum;
    }
}

// sums[a] += sum of weights[a][b] * rows[b]; with the weights transposed, weights[b][a].
DEVICE void accumulate(const float (*weights)[T + 1], bool is_transposed, const float* rows, u64 d,
                       float* sums) {
    u32 row = threadIdx.x / PER_ROW;
    for (u64 column = threadIdx.x % PER_ROW; column < d; column += PER_ROW) {
        float sum = 0.0f;
        for (int i = 0; i < T; i++) {
            sum += (is_transposed ? weights[i][row] : weights[row][i]) * rows[i * (d + 1) + column];
        }
        sums[row * (d + 1) + column] += sum;
    }
}

extern __shared__ float shared[];

// A block for each T queries, head and sample.
KERNEL attention(const X* q, const X* k, const X* v, X* out, float* statistics, SHAPE_PARAMETERS) {
    Shape s = SHAPE;
    __shared__ float scores[T][T + 1], most[T], total[T], old[T];
    u64 first = (u64)blockIdx.x * T, head = blockIdx.y, sample = blockIdx.z;
    u64 kv_head = head / (heads / kv_heads), count = queries - first < T ? queries - first : T;
    u64 row_width = heads * d, kv_width = kv_heads * d;
    float *qs = shared, *ks = qs + T * (d + 1), *vs = ks + T * (d + 1), *sums = vs + T * (d + 1);
    load_rows(q + (sample * queries + first) * row_width + head * d, row_width, count, d, qs);
    clear_rows(sums, d);
    if (threadIdx.x < T) { most[threadIdx.x] = -INFINITY; total[threadIdx.x] = 0.0f; }
    u64 end = seen(s, sample, first + count - 1);
    for (u64 key = firsts_of(s, sample, first, count).least; key < end; key += T) {
        u64 n = keys - key < T ? keys - key : T, at = (sample * keys + key) * kv_width + kv_head * d;
        __syncthreads();
        load_rows(k + at, kv_width, n, d, ks);
        load_rows(v + at, kv_width, n, d, vs);
        __syncthreads();
        multiply(qs, ks, d, scores);
        __syncthreads();
        // Scores become weights relative to the largest so far; a thread for each row.
        if (threadIdx.x < T) {
            u32 row = threadIdx.x;
            u64 query = first + row, sees = row < count ? seen(s, sample, query) : 0;
            u64 from = row < count ? first_key(s, sample, query) : 0;
            float before = most[row], now = before, sum = 0.0f;
            for (u64 i = 0; i < T; i++) {
                float x = -INFINITY;
                if (key + i >= from && key + i < sees) x = scale * scores[row][i] + bias(s, head, query, key + i);
                scores[row][i] = x;
                now = larger(now, x);
            }
            float center = now == -INFINITY ? 0.0f : now;
            for (int i = 0; i < T; i++) {
                float weight = expf(scores[row][i] - center);
                scores[row][i] = key + i >= from && key + i < sees ? weight : 0.0f;
                sum += scores[row][i];
            }
            old[row] = expf(before - center);
            total[row] = total[row] * old[row] + sum;
            most[row] = now;
        }
        __syncthreads();
        u32 row = threadIdx.x / PER_ROW;
        for (u64 i = threadIdx.x % PER_ROW; i < d; i += PER_ROW) sums[row * (d + 1) + i] *= old[row];
        accumulate(scores, false, vs, d, sums);
    }
    __syncthreads();
    u32 row = threadIdx.x / PER_ROW;
    if (row >= count) return;
    float inverse = total[row] == 0.0f ? 0.0f : 1.0f / total[row];
    X* to = out + (sample * queries + first + row) * row_width + head * d;
    for (u64 i = threadIdx.x % PER_ROW; i < d; i += PER_ROW) {
        to[i] = from_f32<X>(sums[row * (d + 1) + i] * inverse);
    }
    if (threadIdx.x % PER_ROW == 0) {
        float logarithm = total[row] == 0.0f ? INFINITY : most[row] + logf(total[row]);
        statistics[(sample * heads + head) * queries + first + row] = logarithm;
    }
}

// A warp for each query and head.
KERNEL attention_delta(const X* out, const X* dout, float* delta, u64 n, SHAPE_PARAMETERS) {
    u64 at = warp();
    if (at >= n) return;
    u64 query = at % queries, head = at / queries % heads, sample = at / queries / heads;
    u64 from = ((sample * queries + query) * heads + head) * d;
    float sum = 0.0f;
    for (u64 i = lane(); i < d; i += 32) sum += to_f32(out[from + i]) * to_f32(dout[from + i]);
    sum = warp_sum(sum);
    if (lane() == 0) delta[at] = sum;
}

// Scores of q and k become weights, and dout * v the gradients of scale * q * k.
DEVICE void score_gradients(const Shape& s, u64 sample, u64 head, u64 query, u64 key, u64 count,
                   const float* statistics, const float* delta, float (*weights)[T + 1],
                   float (*scores)[T + 1]) {
    u32 row = threadIdx.x / PER_ROW;
    u64 at = (sample * s.heads + head) * s.queries + query + row;
    u64 sees = row < count ? seen(s, sample, query + row) : 0;
    u64 from = row < count ? first_key(s, sample, query + row) : 0;
    for (u32 i = threadIdx.x % PER_ROW; i < T; i += PER_ROW) {
        float weight = 0.0f, slope = 0.0f;
        if (key + i >= from && key + i < sees) {
            float x = s.scale * weights[row][i] + bias(s, head, query + row, key + i);
            weight = expf(x - statistics[at]);
            slope = weight * (scores[row][i] - delta[at]) * s.scale;
        }
        weights[row][i] = weight;
        scores[row][i] = slope;
    }
}

// A block for each T queries, head and sample.
KERNEL attention_dq(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                    const float* delta, X* dq, int add, SHAPE_PARAMETERS) {
    Shape s = SHAPE;
    __shared__ float weights[T][T + 1], scores[T][T + 1];
    u64 first = (u64)blockIdx.x * T, head = blockIdx.y, sample = blockIdx.z;
    u64 kv_head = head / (heads / kv_heads), count = queries - first < T ? queries - first : T;
    u64 row_width = heads * d, kv_width = kv_heads * d, tile = T * (d + 1);
    float *qs = shared, *ds = qs + tile, *ks = ds + tile, *vs = ks + tile, *sums = vs + tile;
    u64 own = (sample * queries + first) * row_width + head * d;
    load_rows(q + own, row_width, count, d, qs);
    load_rows(dout + own, row_width, count, d, ds);
    clear_rows(sums, d);
    u64 end = seen(s, sample, first + count - 1);
    for (u64 key = firsts_of(s, sample, first, count).least; key < end; key += T) {
        u64 n = keys - key < T ? keys - key : T, at = (sample * keys + key) * kv_width + kv_head * d;
        __syncthreads();
        load_rows(k + at, kv_width, n, d, ks);
        load_rows(v + at, kv_width, n, d, vs);
        __syncthreads();
        multiply(qs, ks, d, weights);
        multiply(ds, vs, d, scores);
        __syncthreads();
        score_gradients(s, sample, head, first, key, count, statistics, delta, weights, scores);
        __syncthreads();
        accumulate(scores, false, ks, d, sums);
    }
    __syncthreads();
    u32 row = threadIdx.x / PER_ROW;
    if (row >= count) return;
    for (u64 i = threadIdx.x % PER_ROW; i < d; i += PER_ROW) {
        put(&dq[own + row * row_width + i], sums[row * (d + 1) + i], add);
    }
}

// A block for each T keys, head of keys and sample.
KERNEL attention_dkv(const X* q, const X* k, const X* v, const X* dout, const float* statistics,
                     const float* delta, X* dk, X* dv, int add_k, int add_v, SHAPE_PARAMETERS) {
    Shape s = SHAPE;
    __shared__ float weights[T][T + 1], scores[T][T + 1];
    u64 key = (u64)blockIdx.x * T, kv_head = blockIdx.y, sample = blockIdx.z;
    u64 group = heads / kv_heads, n = keys - key < T ? keys - key : T;
    u64 row_width = heads * d, kv_width = kv_heads * d, tile = T * (d + 1);
    float *ks = shared, *vs = ks + tile, *qs = vs + tile, *ds = qs + tile;
    float *k_sums = ds + tile, *v_sums = k_sums + tile;
    u64 own = (sample * keys + key) * kv_width + kv_head * d;
    load_rows(k + own, kv_width, n, d, ks);
    load_rows(v + own, kv_width, n, d, vs);
    clear_rows(k_sums, d);
    clear_rows(v_sums, d);
    for (u64 head = kv_head * group; head < (kv_head + 1) * group; head++) {
        for (u64 first = 0; first < queries; first += T) {
            u64 count = queries - first < T ? queries - first : T;
            // The last of the queries sees the most.
            if (seen(s, sample, first + count - 1) <= key) continue;
            if (firsts_of(s, sample, first, count).least >= key + n) continue;
            u64 at = (sample * queries + first) * row_width + head * d;
            __syncthreads();
            load_rows(q + at, row_width, count, d, qs);
            load_rows(dout + at, row_width, count, d, ds);
            __syncthreads();
            multiply(qs, ks, d, weights);
            multiply(ds, vs, d, scores);
            __syncthreads();
            score_gradients(s, sample, head, first, key, count, statistics, delta, weights, scores);
            __syncthreads();
            accumulate(weights, true, ds, d, v_sums);
            accumulate(scores, true, qs, d, k_sums);
        }
    }
    __syncthreads();
    u32 row = threadIdx.x / PER_ROW;
    if (row >= n) return;
    for (u64 i = threadIdx.x % PER_ROW; i < d; i += PER_ROW) {
        put(&dk[own + row * kv_width + i], k_sums[row * (d + 1) + i], add_k);
        put(&dv[own + row * kv_width + i], v_sums[row * (d + 1) + i], add_v);
    }
}
