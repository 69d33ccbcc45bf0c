// Groups of a row mixed by a matrix.

// A thread finds P numbers of TILE groups, for which it reads those of x once.
#define TILE 4

KERNEL mix_groups(const X* x, const float* w, Y* y, u64 n, u64 from, u64 to, u64 width, u64 step, u64 row_step,
                  float scale, int add) {
    u64 index = thread();
    if (index >= n) return;
    u64 packs = width / P, tiles = (to + TILE - 1) / TILE;
    u64 at = index % packs * P, first = index / packs % tiles * TILE, row = index / packs / tiles;
    float sums[TILE][P] = {};
    for (u64 p = 0; p < from; p++) {
        float some[P];
        load(x + (row * from + p) * width + at, some);
#pragma unroll
        for (int i = 0; i < TILE; i++) {
            if (first + i >= to) break;
            float factor = w[(first + i) * row_step + p * step];
#pragma unroll
            for (int k = 0; k < P; k++) sums[i][k] += factor * some[k];
        }
    }
#pragma unroll
    for (int i = 0; i < TILE; i++) {
        if (first + i >= to) break;
#pragma unroll
        for (int k = 0; k < P; k++) sums[i][k] *= scale;
        store(sums[i], y + (row * to + first + i) * width + at, add);
    }
}

// The weight's gradient for some rows, a block for 16 by 16 numbers of it.
#define BLOCK 16
#define STRIP 32

KERNEL mix_groups_weight(const X* x, const X* gradient, float* partial, u64 rows, u64 share, u64 from, u64 to,
                         u64 width, float scale) {
    __shared__ float some_g[BLOCK][STRIP + 1], some_x[BLOCK][STRIP + 1];
    u64 i = threadIdx.x / BLOCK, p = threadIdx.x % BLOCK;
    u64 first_i = blockIdx.y * BLOCK, first_p = blockIdx.z * BLOCK;
    u64 end = (blockIdx.x + 1) * share < rows ? (blockIdx.x + 1) * share : rows;
    float sum = 0.0f;
    for (u64 row = blockIdx.x * share; row < end; row++) {
        for (u64 at = 0; at < width; at += STRIP) {
            for (u32 k = threadIdx.x; k < BLOCK * STRIP; k += blockDim.x) {
                u64 group = k / STRIP, place = at + k % STRIP;
                bool in_g = first_i + group < to && place < width, in_x = first_p + group < from && place < width;
                some_g[group][k % STRIP] =
                    in_g ? to_f32(gradient[(row * to + first_i + group) * width + place]) : 0.0f;
                some_x[group][k % STRIP] =
                    in_x ? to_f32(x[(row * from + first_p + group) * width + place]) : 0.0f;
            }
            __syncthreads();
#pragma unroll
            for (int k = 0; k < STRIP; k++) sum += some_g[i][k] * some_x[p][k];
            __syncthreads();
        }
    }
    if (first_i + i < to && first_p + p < from) {
        partial[(u64)blockIdx.x * to * from + (first_i + i) * from + first_p + p] = scale * sum;
    }
}
