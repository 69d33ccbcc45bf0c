// Prodigy: moments and two sums over all parameters, the next d, and the parameters. `estimates` are d, n, the size of s,
// and d before the last step.

// Tensors are parameters, gradients, first and second moments, first parameters and sums of gradients. A block for every
// `share` elements writes the sums of g * (start - p) and of |s|.
KERNEL prodigy_moments(double* partial, u64 share, const float* estimates, const float* norm, float most, float scale,
                       float keeps, float news, float square_keeps, float squares, float sum_keeps, float sum_rate,
                       float d0, const Many many) {
    u64 block;
    const One& one = of_block(many, block);
    const float *params = (const float*)one.at[0], *gradients = (const float*)one.at[1];
    float *first = (float*)one.at[2], *second = (float*)one.at[3], *sums = (float*)one.at[5];
    const float* start = (const float*)one.at[4];
    u64 begin = block * share, end = begin + share < one.n ? begin + share : one.n;
    double dot = 0.0, size = 0.0;
    if (step_scale(norm, most, scale)) {
        float d = estimates[0], along = d / d0 * d * sum_rate;
        for (u64 at = begin + threadIdx.x; at < end; at += blockDim.x) {
            float g = scale * gradients[at], sum = sums[at] * sum_keeps + g * along;
            first[at] = first[at] * keeps + g * (news * d);
            second[at] = second[at] * square_keeps + g * g * (squares * d * d);
            sums[at] = sum;
            dot += (double)g * (start[at] - params[at]);
            size += fabsf(sum);
        }
    }
    dot = block_sum(dot);
    size = block_sum(size);
    if (threadIdx.x == 0) {
        partial[2 * blockIdx.x] = dot;
        partial[2 * blockIdx.x + 1] = size;
    }
}

// One block: the next d.
KERNEL prodigy_distance(const double* partial, u64 n, float* estimates, const float* norm, float most, float scale,
                        float sum_keeps, float rate, float d0, float coefficient) {
    double dot = 0.0, size = 0.0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) {
        dot += partial[2 * i];
        size += partial[2 * i + 1];
    }
    dot = block_sum(dot);
    size = block_sum(size);
    if (threadIdx.x != 0 || !step_scale(norm, most, scale)) return;
    double d = estimates[0];
    estimates[2] = (float)size;
    estimates[3] = (float)d;
    if (size == 0.0) return;
    double numerator = (double)sum_keeps * estimates[1] + d / d0 * d * rate * dot;
    double found = coefficient * numerator / size;
    estimates[1] = (float)numerator;
    estimates[0] = (float)(found > d ? found : d);
}

// Tensors as above.
KERNEL prodigy_params(u64 share, const float* estimates, const float* norm, float most, float scale, float rate,
                      float decay, float epsilon, const Many many) {
    if (!step_scale(norm, most, scale) || estimates[2] == 0.0f) return;
    u64 block;
    const One& one = of_block(many, block);
    float* params = (float*)one.at[0];
    const float *first = (const float*)one.at[2], *second = (const float*)one.at[3];
    float length = estimates[3] * rate, shrinks = length * decay, least = estimates[0] * epsilon;
    u64 begin = block * share, end = begin + share < one.n ? begin + share : one.n;
    for (u64 at = begin + threadIdx.x; at < end; at += blockDim.x) {
        params[at] -= params[at] * shrinks + length * (first[at] / (sqrtf(second[at]) + least));
    }
}
