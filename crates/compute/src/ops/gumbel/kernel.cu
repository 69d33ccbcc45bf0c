// Random choices, a block for each row. They are made from numbers in f32, before rounding to a narrow
// dtype could make two of them equal. Noise is found again for each pass: it is a function of its place.

// Half a step of the random numbers below 1: what is nearer counts as this far.
#define NEAREST_TO_ONE (1.0f / (1 << 25))

struct Draw { u64 seed, stream, first; int mirrored; };

DEVICE float score(const X* logits, u64 at, Draw draw) {
    float u = random_uniform(draw.seed, draw.stream, draw.first + at);
    float wait = -logf(draw.mirrored ? 1.0f - u : u);
    return to_f32(logits[at]) - logf(wait < NEAREST_TO_ONE ? NEAREST_TO_ONE : wait);
}

// Soft choices, and the hard ones that belong to them: either may be left out. `soft` or `hard` may lie
// where the logits do, since each thread writes the numbers that it read.
KERNEL gumbel(const X* logits, X* soft, X* hard, u64 width, float temperature, int mirrored, u64 seed,
              u64 stream, u64 first_number) {
    Draw draw = {seed, stream, first_number, mirrored};
    u64 first = (u64)blockIdx.x * width;
    float most = -INFINITY;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        most = larger(most, score(logits, first + i, draw));
    }
    most = block_max(most);
    float sum = 0.0f;
    // The first of the largest, counted from the end so that the largest count is the first place.
    float chosen = 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float x = score(logits, first + i, draw);
        sum += expf((x - most) / temperature);
        if (x == most && chosen == 0.0f) chosen = (float)(width - i);
    }
    float inverse = 1.0f / block_sum(sum);
    chosen = block_max(chosen);
    bool is_defined = most - most == 0.0f;
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float x = score(logits, first + i, draw);
        float one = (float)(width - i) == chosen ? 1.0f : 0.0f;
        if (soft) soft[first + i] = from_f32<X>(expf((x - most) / temperature) * inverse);
        if (hard) hard[first + i] = from_f32<X>(is_defined ? one : NOT_A_NUMBER);
    }
}

// dlogits = soft * (gradient - sum of gradient * soft) / temperature, in place. Twice: the first mean is
// off by as much as rounding moved the sum of a row from 1.
KERNEL gumbel_backward(const X* soft, X* gradient, u64 width, float temperature) {
    u64 first = (u64)blockIdx.x * width;
    float mean = 0.0f;
    for (int time = 0; time < 2; time++) {
        float sum = 0.0f;
        for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
            sum += (to_f32(gradient[first + i]) - mean) * to_f32(soft[first + i]);
        }
        mean += block_sum(sum);
    }
    for (u64 i = threadIdx.x; i < width; i += blockDim.x) {
        float g = to_f32(gradient[first + i]) - mean;
        gradient[first + i] = from_f32<X>(to_f32(soft[first + i]) * g / temperature);
    }
}
