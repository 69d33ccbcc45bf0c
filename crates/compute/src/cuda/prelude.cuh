// What kernels begin with: dtypes, reading and writing several numbers at once, sums over
// threads, activations, random numbers. X and Y are the dtypes of a kernel's tensors and P the
// elements that a thread takes at a time, D a constant that the kernel source explains; all are given at compile time. No header
// is included, so that NVRTC needs no toolkit folder.
//
// Arithmetic is f32 whatever the storage. Every sum has one order, whatever the GPU is doing.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define KERNEL extern "C" __global__ void

#define INFINITY __int_as_float(0x7f800000)
#define NOT_A_NUMBER __int_as_float(0x7fffffff)

struct bf16 { u16 bits; };
struct f16 { u16 bits; };

DEVICE float to_f32(float x) { return x; }
DEVICE float to_f32(bf16 x) { return __uint_as_float((u32)x.bits << 16); }
DEVICE float to_f32(f16 x) {
    float y;
    asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
    return y;
}

// To nearest, ties to even; NaN stays so.
template <class T> DEVICE T from_f32(float x);
template <> DEVICE float from_f32<float>(float x) { return x; }
template <> DEVICE bf16 from_f32<bf16>(float x) {
    bf16 y;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}
template <> DEVICE f16 from_f32<f16>(float x) {
    f16 y;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
    return y;
}

// P adjacent elements.
template <class T> struct alignas(P * sizeof(T) < 16 ? P * sizeof(T) : 16) Pack { T numbers[P]; };

template <class T> DEVICE void unpack(const Pack<T>& from, float (&to)[P]) {
#pragma unroll
    for (int i = 0; i < P; i++) to[i] = to_f32(from.numbers[i]);
}

template <class T> DEVICE void load(const T* from, float (&to)[P]) {
    unpack(*(const Pack<T>*)from, to);
}

template <class T> DEVICE void store(const float (&from)[P], T* to, int add) {
    Pack<T> raw;
    if (add) {
        raw = *(Pack<T>*)to;
#pragma unroll
        for (int i = 0; i < P; i++) raw.numbers[i] = from_f32<T>(to_f32(raw.numbers[i]) + from[i]);
    } else {
#pragma unroll
        for (int i = 0; i < P; i++) raw.numbers[i] = from_f32<T>(from[i]);
    }
    *(Pack<T>*)to = raw;
}

// One number.
template <class T> DEVICE void put(T* to, float x, int add) {
    *to = from_f32<T>((add ? to_f32(*to) : 0.0f) + x);
}

// The number of this thread among all.
DEVICE u64 thread() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }

// The number of this warp among all, and of this thread in it.
DEVICE u64 warp() { return thread() / 32; }
DEVICE u32 lane() { return threadIdx.x % 32; }

template <class T> DEVICE T warp_sum(T x) {
    for (int step = 16; step > 0; step /= 2) x += __shfl_xor_sync(~0u, x, step);
    return x;
}

// The largest; NaN is larger than all.
DEVICE float larger(float a, float b) { return a > b || a != a ? a : b; }
DEVICE float warp_max(float x) {
    for (int step = 16; step > 0; step /= 2) x = larger(x, __shfl_xor_sync(~0u, x, step));
    return x;
}

// Sums over a block, known to all its threads; the shared memory is free again when it returns.
template <class T> DEVICE T block_sum(T x) {
    __shared__ T parts[32];
    x = warp_sum(x);
    if (lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    T total = 0;
    for (u32 i = 0; i < (blockDim.x + 31) / 32; i++) total += parts[i];
    __syncthreads();
    return total;
}

DEVICE float block_max(float x) {
    __shared__ float parts[32];
    x = warp_max(x);
    if (lane() == 0) parts[threadIdx.x / 32] = x;
    __syncthreads();
    float most = parts[0];
    for (u32 i = 1; i < (blockDim.x + 31) / 32; i++) most = larger(most, parts[i]);
    __syncthreads();
    return most;
}

#if D > 0
// Rows that a block holds: every thread has D packs of a row, read once.

// Where a thread's pack of this number begins in a row.
DEVICE u64 place(int pack) { return (pack * blockDim.x + threadIdx.x) * P; }

// All loads are under way before the first is needed. Beyond the row there are zeros.
template <class T> DEVICE void fetch(const T* row, u64 width, Pack<T> (&to)[D]) {
#pragma unroll
    for (int k = 0; k < D; k++) to[k] = place(k) < width ? *(const Pack<T>*)(row + place(k)) : Pack<T>{};
}

template <class T> DEVICE void hold(const T* row, u64 width, float (&to)[D][P]) {
    Pack<T> raw[D];
    fetch(row, width, raw);
#pragma unroll
    for (int k = 0; k < D; k++) unpack(raw[k], to[k]);
}

// The sums of two numbers over a block, known to all its threads. Steps take turns at two rooms, so that none
// waits for the last one's readers.
DEVICE void block_sums(int step, float& a, float& b) {
    __shared__ float parts[2][2][32];
    a = warp_sum(a);
    b = warp_sum(b);
    if (lane() == 0) {
        parts[step][0][threadIdx.x / 32] = a;
        parts[step][1][threadIdx.x / 32] = b;
    }
    __syncthreads();
    a = b = 0.0f;
    for (u32 i = 0; i < blockDim.x / 32; i++) {
        a += parts[step][0][i];
        b += parts[step][1][i];
    }
}
#endif

DEVICE float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// As `Activation` is numbered.
enum { NONE, GELU_TANH, GELU_ERF, QUICK_GELU, SILU, TANH };

// Hendrycks and Gimpel, arXiv 1606.08415, section 2: sqrt(2 / pi), the cubic term, x * sigmoid(1.702 x).
#define GELU_SCALE 0.7978846f
#define GELU_CUBIC 0.044715f
#define QUICK 1.702f
#define INVERSE_SQRT_2 0.70710678f
#define INVERSE_SQRT_2_PI 0.3989423f

DEVICE float activation(int kind, float x) {
    switch (kind) {
    case GELU_TANH: return x * sigmoid(2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x));
    case GELU_ERF: return 0.5f * x * erfcf(-x * INVERSE_SQRT_2);
    case QUICK_GELU: return x * sigmoid(QUICK * x);
    case SILU: return x * sigmoid(x);
    case TANH: return tanhf(x);
    default: return x;
    }
}

// The derivative of x * sigmoid(z) where dz is that of z.
DEVICE float gate_slope(float x, float z, float dz) {
    float s = sigmoid(z);
    return s + x * s * (1.0f - s) * dz;
}

DEVICE float activation_slope(int kind, float x) {
    switch (kind) {
    case GELU_TANH:
        return gate_slope(x, 2.0f * GELU_SCALE * (x + GELU_CUBIC * x * x * x),
                          2.0f * GELU_SCALE * (1.0f + 3.0f * GELU_CUBIC * x * x));
    case GELU_ERF:
        return 0.5f * erfcf(-x * INVERSE_SQRT_2) + x * INVERSE_SQRT_2_PI * expf(-0.5f * x * x);
    case QUICK_GELU: return gate_slope(x, QUICK * x, QUICK);
    case SILU: return gate_slope(x, x, 1.0f);
    case TANH: {
        float y = tanhf(x);
        return 1.0f - y * y;
    }
    default: return 1.0f;
    }
}

// Both at once.
DEVICE void activation_and_slope(int kind, float x, float& y, float& slope) {
    if (kind == SILU) {
        float s = sigmoid(x);
        y = x * s;
        slope = s + y * (1.0f - s);
    } else {
        y = activation(kind, x);
        slope = activation_slope(kind, x);
    }
}

// Philox4x32-10, as in `random.rs`: the word at an index of a random sequence.
DEVICE u32 random_word(u64 seed, u64 stream, u64 index) {
    u32 key[2] = {(u32)seed, (u32)(seed >> 32)};
    u64 block = index / 4;
    u32 c[4] = {(u32)block, (u32)(block >> 32), (u32)stream, (u32)(stream >> 32)};
    for (int round = 0; round < 10; round++) {
        u64 a = 0xD2511F53ull * c[0], b = 0xCD9E8D57ull * c[2];
        u32 next[4] = {(u32)(b >> 32) ^ c[1] ^ key[0], (u32)b, (u32)(a >> 32) ^ c[3] ^ key[1], (u32)a};
        for (int i = 0; i < 4; i++) c[i] = next[i];
        key[0] += 0x9E3779B9u;
        key[1] += 0xBB67AE85u;
    }
    u32 at = index % 4;
    return at == 0 ? c[0] : at == 1 ? c[1] : at == 2 ? c[2] : c[3];
}

// Uniform over (0, 1), both excluded.
DEVICE float random_uniform(u64 seed, u64 stream, u64 index) {
    return ((float)(random_word(seed, stream, index) >> 9) + 0.5f) * (1.0f / (1 << 23));
}

// Of the standard normal distribution, by Box and Muller in f64, as in `RandomSequence::normal`.
DEVICE float random_normal(u64 seed, u64 stream, u64 index) {
    u64 pair = index / 2 * 2;
    double radius = random_uniform(seed, stream, pair), angle = random_uniform(seed, stream, pair + 1);
    double sine, cosine;
    sincos(6.283185307179586476925 * angle, &sine, &cosine);
    return (float)(sqrt(-2.0 * log(radius)) * (index % 2 == 0 ? cosine : sine));
}
