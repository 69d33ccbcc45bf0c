// Steps, norms and averages of parameters, all f32 but for what is said to be X.

// What gradients are multiplied by. The norm is read where it was found; one that is not finite makes
// the step change nothing.
DEVICE bool step_scale(const float* norm, float most, float& scale) {
    if (!norm) return true;
    float length = scale * *norm, share = most / (length + 1e-6f);
    scale *= share < 1.0f ? share : 1.0f;
    return length - length == 0.0f;
}

struct Update { float scale, remains, news, keeps, squares, correction, epsilon, rate; };

DEVICE void update_one(Update u, float g, float& p, float& first, float& second) {
    g *= u.scale;
    first += (g - first) * u.news;
    second = second * u.keeps + g * g * u.squares;
    float denominator = sqrtf(second) * u.correction + u.epsilon;
    p = p * u.remains - u.rate * (first / denominator);
}

// A thread for each number.
KERNEL adamw(float* params, const float* gradients, float* first, float* second, u64 n,
             const float* norm, float most, float scale, float remains, float news, float keeps,
             float squares, float correction, float epsilon, float rate) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    Update u = {scale, remains, news, keeps, squares, correction, epsilon, rate};
    update_one(u, gradients[at], params[at], first[at], second[at]);
}

// The code nearest to a number; `book` has 256 values and then the bounds between sizes above zero.
DEVICE u8 nearest(const float* book, int zero, float x) {
    const float* bounds = book + 256;
    float size = fabsf(x);
    int low = 0, high = 255;
    while (low < high) {
        int middle = (low + high) / 2;
        if (bounds[middle] < size) low = middle + 1; else high = middle;
    }
    int code = zero + (x < 0.0f ? -low : low);
    return code < 0 ? 0 : code > 255 ? 255 : code;
}

// A block for each 256 numbers, which share a scale: their largest size.
KERNEL adamw_8bit(float* params, const float* gradients, u8* first_codes, float* first_scales,
                  u8* second_codes, float* second_scales, const float* signed_book,
                  const float* unsigned_book, int signed_zero, int unsigned_zero, u64 n,
                  const float* norm, float most, float scale, float remains, float news, float keeps,
                  float squares, float correction, float epsilon, float rate) {
    if (!step_scale(norm, most, scale)) return;
    u64 at = thread();
    float mean = 0.0f, square = 0.0f;
    if (at < n) {
        Update u = {scale, remains, news, keeps, squares, correction, epsilon, rate};
        mean = signed_book[first_codes[at]] * first_scales[blockIdx.x];
        square = unsigned_book[second_codes[at]] * second_scales[blockIdx.x];
        update_one(u, gradients[at], params[at], mean, square);
    }
    float mean_scale = block_max(fabsf(mean)), square_scale = block_max(square);
    if (threadIdx.x == 0) {
        first_scales[blockIdx.x] = mean_scale;
        second_scales[blockIdx.x] = square_scale;
    }
    if (at >= n) return;
    first_codes[at] = nearest(signed_book, signed_zero, mean / (mean_scale == 0.0f ? 1.0f : mean_scale));
    second_codes[at] =
        nearest(unsigned_book, unsigned_zero, square / (square_scale == 0.0f ? 1.0f : square_scale));
}

// Where Muon goes: the mean of gradients, with the newest of them counted once more.
DEVICE float nesterov(float g, float mean, float momentum) { return g + (mean - g) * momentum; }

// A block for every `share` numbers moves the mean on and writes the sum of the squares of the direction.
KERNEL move_mean(const float* gradient, float* mean, double* partial, u64 n, u64 share, const float* norm,
                 float most, float scale, float momentum) {
    u64 first = blockIdx.x * share, end = first + share < n ? first + share : n;
    double sum = 0.0;
    if (step_scale(norm, most, scale)) {
        for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
            float g = scale * gradient[i], now = mean[i] + (g - mean[i]) * (1.0f - momentum);
            mean[i] = now;
            float x = nesterov(g, now, momentum);
            sum += (double)x * x;
        }
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

KERNEL direction(const float* gradient, const float* mean, const float* length, X* x, u64 n, float least,
                 const float* norm, float most, float scale, float momentum) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    float inverse = 1.0f / larger(*length, least);
    x[at] = from_f32<X>(nesterov(scale * gradient[at], mean[at], momentum) * inverse);
}

KERNEL follow(float* params, const X* x, u64 n, const float* norm, float most, float scale, float remains,
              float rate) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    params[at] = params[at] * remains - rate * to_f32(x[at]);
}

// A block for every `share` numbers writes the sum of their squares.
KERNEL squares(const float* gradient, double* partial, u64 n, u64 share) {
    u64 first = blockIdx.x * share, end = first + share < n ? first + share : n;
    double sum = 0.0;
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) sum += (double)gradient[i] * gradient[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

// One block.
KERNEL root(const double* partial, u64 n, float* norm) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += partial[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) *norm = (float)sqrt(sum);
}

// A thread for each number; counts may be added in any order.
KERNEL count_not_finite(const X* numbers, u32* count, u64 n) {
    u64 at = thread();
    float x = at < n ? to_f32(numbers[at]) : 0.0f;
    u32 all = __popc(__ballot_sync(~0u, x - x != 0.0f));
    if (lane() == 0 && all) atomicAdd(count, all);
}

KERNEL ema(float* average, const X* value, u64 n, float decay) {
    u64 at = thread();
    if (at < n) average[at] = decay * average[at] + (1.0f - decay) * to_f32(value[at]);
}
