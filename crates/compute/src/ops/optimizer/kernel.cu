// Steps, norms and averages of parameters, all f32 but for what is said to be X.

struct Update { float scale, remains, news, keeps, squares, correction, epsilon, rate; };

DEVICE void update_one(Update u, float g, float& p, float& first, float& second) {
    g *= u.scale;
    first += (g - first) * u.news;
    second = second * u.keeps + g * g * u.squares;
    float denominator = sqrtf(second) * u.correction + u.epsilon;
    p = p * u.remains - u.rate * (first / denominator);
}

// Tensors are parameters, gradients, first and second moments; a block for every `share` elements.
KERNEL adamw(u64 share, const float* norm, float most, float scale, float remains, float news, float keeps,
             float squares, float correction, float epsilon, float rate, const Many many) {
    if (!step_scale(norm, most, scale)) return;
    Update u = {scale, remains, news, keeps, squares, correction, epsilon, rate};
    u64 block;
    const One& one = of_block(many, block);
    float *params = (float*)one.at[0], *first = (float*)one.at[2], *second = (float*)one.at[3];
    const float* gradients = (const float*)one.at[1];
    u64 end = (block + 1) * share < one.n ? (block + 1) * share : one.n, fours = end - end % 4;
    for (u64 at = block * share + 4 * threadIdx.x; at < fours; at += 4 * blockDim.x) {
        Four g = four(gradients + at), p = four(params + at), m = four(first + at), v = four(second + at);
        for (int i = 0; i < 4; i++) update_one(u, g.x[i], p.x[i], m.x[i], v.x[i]);
        four(params + at) = p;
        four(first + at) = m;
        four(second + at) = v;
    }
    u64 at = fours + threadIdx.x;
    if (at < end) update_one(u, gradients[at], params[at], first[at], second[at]);
}

struct LionUpdate { float scale, shrinks, keeps, news, mean_keeps, mean_news, rate; };

DEVICE void lion_one(LionUpdate u, float g, float& p, float& mean) {
    g *= u.scale;
    float along = mean * u.keeps + g * u.news;
    // What is not finite stays visible.
    float sign = along - along != 0.0f ? along : (float)(along > 0.0f) - (float)(along < 0.0f);
    p -= p * u.shrinks + u.rate * sign;
    mean = mean * u.mean_keeps + g * u.mean_news;
}

// Tensors are parameters, gradients and means.
KERNEL lion(u64 share, const float* norm, float most, float scale, float shrinks, float keeps, float news,
            float mean_keeps, float mean_news, float rate, const Many many) {
    if (!step_scale(norm, most, scale)) return;
    LionUpdate u = {scale, shrinks, keeps, news, mean_keeps, mean_news, rate};
    u64 block;
    const One& one = of_block(many, block);
    float *params = (float*)one.at[0], *means = (float*)one.at[2];
    const float* gradients = (const float*)one.at[1];
    u64 end = (block + 1) * share < one.n ? (block + 1) * share : one.n, fours = end - end % 4;
    for (u64 at = block * share + 4 * threadIdx.x; at < fours; at += 4 * blockDim.x) {
        Four g = four(gradients + at), p = four(params + at), m = four(means + at);
        for (int i = 0; i < 4; i++) lion_one(u, g.x[i], p.x[i], m.x[i]);
        four(params + at) = p;
        four(means + at) = m;
    }
    u64 at = fours + threadIdx.x;
    if (at < end) lion_one(u, gradients[at], params[at], means[at]);
}

struct ScheduleFree { float scale, keeps, squares, correction, epsilon, decay, weight, y_rate, rate; };

DEVICE void schedule_free_one(ScheduleFree u, float g, float& y, float& z, float& second) {
    g *= u.scale;
    second = second * u.keeps + g * g * u.squares;
    float along = g / (sqrtf(second) * u.correction + u.epsilon) + u.decay * y;
    y = y + (z - y) * u.weight - u.y_rate * along;
    z -= u.rate * along;
}

// Tensors are parameters, gradients, z and second moments.
KERNEL schedule_free(u64 share, const float* norm, float most, float scale, float keeps, float squares,
                     float correction, float epsilon, float decay, float weight, float y_rate, float rate,
                     const Many many) {
    if (!step_scale(norm, most, scale)) return;
    ScheduleFree u = {scale, keeps, squares, correction, epsilon, decay, weight, y_rate, rate};
    u64 block;
    const One& one = of_block(many, block);
    float *params = (float*)one.at[0], *zs = (float*)one.at[2], *second = (float*)one.at[3];
    const float* gradients = (const float*)one.at[1];
    u64 end = (block + 1) * share < one.n ? (block + 1) * share : one.n, fours = end - end % 4;
    for (u64 at = block * share + 4 * threadIdx.x; at < fours; at += 4 * blockDim.x) {
        Four g = four(gradients + at), y = four(params + at), z = four(zs + at), v = four(second + at);
        for (int i = 0; i < 4; i++) schedule_free_one(u, g.x[i], y.x[i], z.x[i], v.x[i]);
        four(params + at) = y;
        four(zs + at) = z;
        four(second + at) = v;
    }
    u64 at = fours + threadIdx.x;
    if (at < end) schedule_free_one(u, gradients[at], params[at], zs[at], second[at]);
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

// A block for each 256 elements, which share a scale: their largest size. Tensors are parameters, gradients,
// codes and scales of first moments, then of second ones.
KERNEL adamw_8bit(const float* signed_book, const float* unsigned_book, int signed_zero, int unsigned_zero,
                  const float* norm, float most, float scale, float remains, float news, float keeps,
                  float squares, float correction, float epsilon, float rate, const Many many) {
    if (!step_scale(norm, most, scale)) return;
    u64 block;
    const One& one = of_block(many, block);
    u8 *first_codes = (u8*)one.at[2], *second_codes = (u8*)one.at[4];
    float *first_scales = (float*)one.at[3], *second_scales = (float*)one.at[5];
    u64 at = block * blockDim.x + threadIdx.x, n = one.n;
    float mean = 0.0f, square = 0.0f;
    if (at < n) {
        Update u = {scale, remains, news, keeps, squares, correction, epsilon, rate};
        mean = signed_book[first_codes[at]] * first_scales[block];
        square = unsigned_book[second_codes[at]] * second_scales[block];
        update_one(u, ((const float*)one.at[1])[at], ((float*)one.at[0])[at], mean, square);
    }
    float mean_scale = block_max(fabsf(mean)), square_scale = block_max(square);
    if (threadIdx.x == 0) {
        first_scales[block] = mean_scale;
        second_scales[block] = square_scale;
    }
    if (at >= n) return;
    first_codes[at] = nearest(signed_book, signed_zero, mean / (mean_scale == 0.0f ? 1.0f : mean_scale));
    second_codes[at] =
        nearest(unsigned_book, unsigned_zero, square / (square_scale == 0.0f ? 1.0f : square_scale));
}

// Nesterov momentum: the mean of gradients, with the newest of them counted once more.
DEVICE float nesterov(float g, float mean, float momentum) { return g + (mean - g) * momentum; }

// A block for every `share` elements updates the mean and writes the sum of the squares of the direction.
KERNEL update_momentum(const float* gradient, float* mean, double* partial, u64 n, u64 share, const float* norm,
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

KERNEL apply_update(float* params, const X* x, u64 n, const float* norm, float most, float scale, float remains,
              float rate) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    params[at] = params[at] * remains - rate * to_f32(x[at]);
}

// A block for every `share` elements writes the sum of their squares.
KERNEL squares(double* partial, u64 share, const Many many) {
    u64 block;
    const One& one = of_block(many, block);
    const float* gradient = (const float*)one.at[0];
    u64 first = block * share, end = first + share < one.n ? first + share : one.n;
    double sum = 0.0;
    u64 fours = end - end % 4;
    for (u64 at = first + 4 * threadIdx.x; at < fours; at += 4 * blockDim.x) {
        Four g = four(gradient + at);
        for (int i = 0; i < 4; i++) sum += (double)g.x[i] * g.x[i];
    }
    u64 at = fours + threadIdx.x;
    if (at < end) sum += (double)gradient[at] * gradient[at];
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

// A block for every `share` elements; counts may be added in any order.
KERNEL count_not_finite(u32* count, u64 share, const Many many) {
    u64 block;
    const One& one = of_block(many, block);
    const X* numbers = (const X*)one.at[0];
    u64 first = block * share, end = first + share < one.n ? first + share : one.n;
    int all = 0;
    for (u64 i = first + threadIdx.x; i < end; i += blockDim.x) {
        float x = to_f32(numbers[i]);
        all += x - x != 0.0f;
    }
    all = block_sum(all);
    if (threadIdx.x == 0 && all) atomicAdd(count, (u32)all);
}

KERNEL ema(float* average, const X* value, u64 n, float decay) {
    u64 at = thread();
    if (at < n) average[at] = decay * average[at] + (1.0f - decay) * to_f32(value[at]);
}

// Up or down at random, by the carry of what is cut off plus a random number of as many bits.
KERNEL stochastic_round(const float* values, bf16* rounded, u64 n, u64 seed, u64 stream, u64 first) {
    u64 at = thread();
    if (at >= n) return;
    float value = values[at];
    u32 bits = __float_as_uint(value) + (random_word(seed, stream, first + at) & 0xffff);
    bf16 up_or_down;
    up_or_down.bits = (u16)(bits >> 16);
    rounded[at] = value - value == 0.0f ? up_or_down : from_f32<bf16>(value);
}
