// Quantise and dequantise. X is the dtype of a matrix, Y that of what is read back.
// Dtypes are numbered as in `cuda.rs`: 0 int8, 1 fp8 (e4m3), 2 nf4.

// From the paper, as in `read.rs`.
__constant__ float NF4[16] = {
    -1.0f, -0.6961928f, -0.52507305f, -0.3949175f, -0.28444138f, -0.18477343f, -0.091050036f, 0.0f,
    0.0795803f, 0.1609302f, 0.2461123f, 0.33791524f, 0.44070983f, 0.562617f, 0.72295684f, 1.0f};

// Exponent and fraction moved to where f32 has them give the number times 2^-120.
DEVICE float from_e4m3(u8 code) {
    if ((code & 0x7f) == 0x7f) return NOT_A_NUMBER;
    float size = __uint_as_float((u32)(code & 0x7f) << 20) * __uint_as_float((127 + 120) << 23);
    return code & 0x80 ? -size : size;
}

// The code of the nearest e4m3 number, ties to an even code; what is larger than all becomes the largest.
DEVICE u8 to_e4m3(float x) {
    if (x != x) return 0x7f;
    u8 sign = __float_as_uint(x) >> 31 ? 0x80 : 0;
    float size = fabsf(x);
    int low = 0, high = 0x7e;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (from_e4m3(middle) <= size) low = middle; else high = middle;
    }
    float below = size - from_e4m3(low), above = from_e4m3(high) - size;
    return sign | (below > above || (below == above && low % 2 == 1) ? high : low);
}

// Two at once, the first in the lower byte. What cannot be is not a number.
DEVICE u16 to_e4m3_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
    u16 pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
    return pair;
#else
    return to_e4m3(a) | to_e4m3(b) << 8;
#endif
}

#if D > 0 && P > 1
// A row of an operand of a matmul, its elements multiplied by factors if there are some, in e4m3 with a scale. A
// block for each row, which it holds.
KERNEL round_rows(const X* x, const float* factors, u8* codes, float* scales, u64 width) {
    u64 first = (u64)blockIdx.x * width;
    float a[D][P], most = 0.0f;
    hold(x + first, width, a);
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (factors && place(k) < width) {
#pragma unroll
            for (int i = 0; i < P; i++) a[k][i] *= factors[place(k) + i];
        }
#pragma unroll
        for (int i = 0; i < P; i++) most = larger(fabsf(a[k][i]), most);
    }
    most = block_max(most);
    if (threadIdx.x == 0) scales[blockIdx.x] = most / 448.0f;
    float inverse = most == 0.0f ? 0.0f : 448.0f / most;
#pragma unroll
    for (int k = 0; k < D; k++) {
        if (place(k) >= width) continue;
        alignas(P) u16 pairs[P / 2];
#pragma unroll
        for (int i = 0; i < P; i += 2) pairs[i / 2] = to_e4m3_pair(a[k][i] * inverse, a[k][i + 1] * inverse);
        *(Pack<u8>*)(codes + first + place(k)) = *(Pack<u8>*)pairs;
    }
}
#endif

// Codes of a matrix with rows for columns: 64 x 64 by a block of 256 threads, 4 x 4 by each. Both sizes are
// multiples of 4.
KERNEL transpose_codes(const u8* codes, u8* out, u64 rows, u64 columns) {
    __shared__ u32 words[64][17];
    u64 row = (u64)blockIdx.y * 64, column = (u64)blockIdx.x * 64;
    u32 x = threadIdx.x % 16, y = threadIdx.x / 16;
    u32 from[4];
    bool is_inside = row + 4 * y < rows && column + 4 * x < columns;
    for (int i = 0; i < 4; i++) {
        from[i] = is_inside ? *(const u32*)(codes + (row + 4 * y + i) * columns + column + 4 * x) : 0;
    }
    // Byte j of each of the four.
    u32 low = __byte_perm(from[0], from[1], 0x5140), high = __byte_perm(from[2], from[3], 0x5140);
    words[4 * x][y] = __byte_perm(low, high, 0x5410);
    words[4 * x + 1][y] = __byte_perm(low, high, 0x7632);
    low = __byte_perm(from[0], from[1], 0x7362), high = __byte_perm(from[2], from[3], 0x7362);
    words[4 * x + 2][y] = __byte_perm(low, high, 0x5410);
    words[4 * x + 3][y] = __byte_perm(low, high, 0x7632);
    __syncthreads();
    for (u32 i = y; i < 64; i += 16) {
        if (column + i < columns && row + 4 * x < rows) *(u32*)(out + (column + i) * rows + row + 4 * x) = words[i][x];
    }
}

// A row of a matrix with its scale. A block for each.
KERNEL quantise_rows(const X* matrix, u8* codes, float* scales, u64 width, int is_fp8) {
    u64 first = (u64)blockIdx.x * width;
    float most = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float size = fabsf(to_f32(matrix[first + i]));
        if (size > most) most = size;
    }
    float scale = block_max(most) / (is_fp8 ? 448.0f : 127.0f);
    if (threadIdx.x == 0) scales[blockIdx.x] = scale;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        // A row of zeros has no scale, and needs none.
        float x = scale == 0.0f ? 0.0f : to_f32(matrix[first + i]) / scale;
        codes[first + i] = is_fp8 ? to_e4m3(x) : (u8)(signed char)(int)rintf(x);
    }
}

DEVICE u8 nearest_nf4(float x) {
    u8 code = 0;
    while (code < 15 && x > 0.5f * (NF4[code] + NF4[code + 1])) code++;
    return code;
}

// 64 numbers with their scale. A warp for each, two numbers for each lane.
KERNEL quantise_blocks(const X* matrix, u8* codes, float* scales, u64 blocks) {
    u64 block = warp();
    if (block >= blocks) return;
    u64 at = block * 32 + lane();
    float a = to_f32(matrix[2 * at]), b = to_f32(matrix[2 * at + 1]);
    float most = fabsf(a) > fabsf(b) || b != b ? fabsf(a) : fabsf(b);
    for (int step = 16; step > 0; step /= 2) most = fmaxf(most, __shfl_xor_sync(~0u, most, step));
    float factor = most == 0.0f ? 0.0f : 1.0f / most;
    codes[at] = nearest_nf4(a * factor) << 4 | nearest_nf4(b * factor);
    if (lane() == 0) scales[block] = most;
}

// The mean of all scales. One block.
KERNEL mean_scale(const float* scales, float* mean, u64 n) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += scales[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *mean = (float)(sum / (n ? n : 1));
}

// The distances of 256 scales from their mean, by the codebook, relative to the largest. A block for
// each group. `book` has 256 values and then the bounds between sizes above zero.
KERNEL quantise_scales(const float* scales, const float* mean, u8* codes, float* groups, u64 n,
                       const float* book, int zero) {
    u64 at = thread();
    float distance = at < n ? scales[at] - *mean : 0.0f, size = fabsf(distance);
    float most = block_max(size);
    if (threadIdx.x == 0) groups[blockIdx.x] = most;
    if (at >= n) return;
    size /= most == 0.0f ? 1.0f : most;
    int low = 0, high = 255;
    while (low < high) {
        int middle = (low + high) / 2;
        if (book[256 + middle] < size) low = middle + 1; else high = middle;
    }
    int code = zero + (distance < 0.0f ? -low : low);
    codes[at] = code < 0 ? 0 : code > 255 ? 255 : code;
}

// Dequantise. A thread for P elements of one row; of nf4 eight, two of which share a byte.
KERNEL dequantise(const u8* codes, const float* scales, const u8* block_codes, const float* groups,
                  const float* mean, const float* book, Y* out, u64 n, u64 width, int how) {
    // Threads look up different numbers at once, which constant memory would answer one after the other.
    __shared__ float nf4[16];
    if (threadIdx.x < 16) nf4[threadIdx.x] = NF4[threadIdx.x];
    __syncthreads();
    u64 at = P * thread();
    if (at >= n) return;
    float x[P];
    if (how == 2) {
        u64 block = at / 64;
        float scale = book[block_codes[block]] * groups[block / 256] + *mean;
        u32 word = *(const u32*)(codes + at / 2);
#pragma unroll
        for (int i = 0; i + 1 < P; i += 2) {
            u8 code = word >> 4 * i;
            x[i] = scale * nf4[code >> 4];
            x[i + 1] = scale * nf4[code & 15];
        }
    } else {
        Pack<u8> raw = *(const Pack<u8>*)(codes + at);
        // A division of 32 bits takes a fraction of one of 64.
        float scale = scales[n >> 32 ? at / width : (u32)at / (u32)width];
#pragma unroll
        for (int i = 0; i < P; i++) {
            u8 code = raw.numbers[i];
            x[i] = scale * (how == 1 ? from_e4m3(code) : (float)(signed char)code);
        }
    }
    store(x, out + at, 0);
}
