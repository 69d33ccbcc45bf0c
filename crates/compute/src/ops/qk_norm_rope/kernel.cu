// Norm and rotation of heads, a warp for each head. A lane has every 32nd pair of its numbers: the pairs
// that are turned, or where nothing is turned the numbers beside each other.

struct Place { u64 a, b; bool has_b; };

// Of d numbers the first `rotary` are turned; those behind them lie beside each other always.
DEVICE Place pair_at(u64 pair, u64 d, u64 rotary, int half_split) {
    if (half_split && pair < rotary / 2) return {pair, pair + rotary / 2, true};
    return {2 * pair, 2 * pair + 1, 2 * pair + 1 < d};
}

// A pair of numbers from where they lie; what is not there counts as zero.
template <class T> DEVICE void get(const T* x, Place at, float& a, float& b) {
    a = to_f32(x[at.a]);
    b = at.has_b ? to_f32(x[at.b]) : 0.0f;
}

DEVICE void put_pair(X* x, Place at, float a, float b) {
    x[at.a] = from_f32<X>(a);
    if (at.has_b) x[at.b] = from_f32<X>(b);
}

// Turns a pair by its angle, forth or back.
DEVICE void turn(const float* angles, u64 pair, u64 rotary, float sign, float& a, float& b) {
    if (!angles || pair >= rotary / 2) return;
    float cosine = angles[2 * pair], sine = sign * angles[2 * pair + 1];
    float x = a * cosine - b * sine;
    b = a * sine + b * cosine;
    a = x;
}

DEVICE float inverse_root(const X* x, u64 d, u64 rotary, int half_split, float epsilon) {
    float squares = 0.0f, a, b;
    for (u64 pair = lane(); pair < (d + 1) / 2; pair += 32) {
        get(x, pair_at(pair, d, rotary, half_split), a, b);
        squares += a * a + b * b;
    }
    return 1.0f / sqrtf(warp_sum(squares) / d + epsilon);
}

// The angles of the token that a head belongs to; where samples share a table it has a row per token.
DEVICE const float* angles_of(const float* table, u64 head, u64 n_heads, u64 table_rows, u64 rotary) {
    return table ? table + head / n_heads % table_rows * rotary : table;
}

KERNEL qk_norm_rope(const X* x, const float* weight, const float* table, X* y, u64 heads, u64 d,
                    u64 n_heads, u64 table_rows, u64 rotary, int half_split, float epsilon) {
    u64 head = warp();
    if (head >= heads) return;
    const float* angles = angles_of(table, head, n_heads, table_rows, rotary);
    x += head * d;
    y += head * d;
    float inverse = weight ? inverse_root(x, d, rotary, half_split, epsilon) : 1.0f, a, b;
    for (u64 pair = lane(); pair < (d + 1) / 2; pair += 32) {
        Place at = pair_at(pair, d, rotary, half_split);
        get(x, at, a, b);
        if (weight) {
            float wa, wb;
            get(weight, at, wa, wb);
            a *= inverse * wa;
            b *= inverse * wb;
        }
        turn(angles, pair, rotary, 1.0f, a, b);
        put_pair(y, at, a, b);
    }
}

// In place: the gradient of the result becomes that of x.
KERNEL qk_norm_rope_backward(const X* x, const float* weight, const float* table, X* gradient,
                             u64 heads, u64 d, u64 n_heads, u64 table_rows, u64 rotary, int half_split,
                             float epsilon) {
    u64 head = warp();
    if (head >= heads) return;
    const float* angles = angles_of(table, head, n_heads, table_rows, rotary);
    x += head * d;
    gradient += head * d;
    float inverse = 1.0f, slope = 0.0f, a, b, ga, gb, wa, wb;
    if (weight) {
        inverse = inverse_root(x, d, rotary, half_split, epsilon);
        float sum = 0.0f;
        for (u64 pair = lane(); pair < (d + 1) / 2; pair += 32) {
            Place at = pair_at(pair, d, rotary, half_split);
            get(gradient, at, ga, gb);
            turn(angles, pair, rotary, -1.0f, ga, gb);
            get(x, at, a, b);
            get(weight, at, wa, wb);
            sum += ga * wa * (a * inverse) + gb * wb * (b * inverse);
        }
        slope = warp_sum(sum) / d;
    }
    for (u64 pair = lane(); pair < (d + 1) / 2; pair += 32) {
        Place at = pair_at(pair, d, rotary, half_split);
        get(gradient, at, ga, gb);
        turn(angles, pair, rotary, -1.0f, ga, gb);
        if (weight) {
            get(x, at, a, b);
            get(weight, at, wa, wb);
            ga = (ga * wa - a * inverse * slope) * inverse;
            gb = (gb * wb - b * inverse * slope) * inverse;
        }
        put_pair(gradient, at, ga, gb);
    }
}

// Sums of gradient * xn over some of the heads, the gradient turned back: a block of one warp for each
// row of `partial` [blocks, d], which another kernel adds up.
KERNEL qk_weight_backward(const X* x, const X* gradient, const float* table, float* partial, u64 heads,
                          u64 d, u64 n_heads, u64 table_rows, u64 rotary, int half_split, float epsilon) {
    float* sums = partial + blockIdx.x * d;
    u64 share = (heads + gridDim.x - 1) / gridDim.x;
    u64 first = blockIdx.x * share, end = first + share < heads ? first + share : heads;
    for (u64 i = lane(); i < d; i += 32) sums[i] = 0.0f;
    __syncwarp();
    for (u64 head = first; head < end; head++) {
        const float* angles = angles_of(table, head, n_heads, table_rows, rotary);
        float inverse = inverse_root(x + head * d, d, rotary, half_split, epsilon), a, b, ga, gb;
        for (u64 pair = lane(); pair < (d + 1) / 2; pair += 32) {
            Place at = pair_at(pair, d, rotary, half_split);
            get(gradient + head * d, at, ga, gb);
            turn(angles, pair, rotary, -1.0f, ga, gb);
            get(x + head * d, at, a, b);
            sums[at.a] += ga * a * inverse;
            if (at.has_b) sums[at.b] += gb * b * inverse;
        }
    }
}
