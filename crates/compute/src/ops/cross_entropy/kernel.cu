// What is done to a piece of the logits. A fold is three numbers per row: the largest logit so far, the
// sum of exponentials relative to it, and the logit of the target.

#define IGNORED 0xffffffffu

// Where nothing is above minus infinity yet, any finite centre gives the right sum: zero.
DEVICE float finite(float most) { return most == -INFINITY ? 0.0f : most; }

// A block for each row.
KERNEL fold(const X* logits, const u32* targets, float* folds, u64 columns, u64 first) {
    u64 row = blockIdx.x;
    logits += row * columns;
    float* fold = folds + 3 * row;
    float most = -INFINITY, sum = 0.0f, some[P];
    for (u64 i = threadIdx.x * P; i < columns; i += blockDim.x * P) {
        load(logits + i, some);
        float next = most;
        for (int j = 0; j < P; j++) next = larger(next, some[j]);
        sum *= expf(most - finite(next));
        for (int j = 0; j < P; j++) sum += expf(some[j] - finite(next));
        most = next;
    }
    float before = first ? fold[0] : -INFINITY, sum_before = first ? fold[1] : 0.0f;
    float largest = larger(before, block_max(most)), center = finite(largest);
    sum = block_sum(sum * expf(most - center));
    if (threadIdx.x) return;
    u64 target = targets[row];
    float kept = first ? fold[2] : -INFINITY;
    fold[2] = target >= first && target - first < columns ? to_f32(logits[target - first]) : kept;
    fold[0] = largest;
    fold[1] = sum_before * expf(before - center) + sum;
}

// The mean over the rows that count. One block.
KERNEL finish(const float* folds, const u32* targets, float* mean, u64 rows, double counted) {
    double total = 0.0;
    for (u64 row = threadIdx.x; row < rows; row += blockDim.x) {
        float loss = folds[3 * row] - folds[3 * row + 2] + logf(folds[3 * row + 1]);
        if (targets[row] != IGNORED) total += loss;
    }
    total = block_sum(total);
    if (threadIdx.x == 0) *mean = (float)(total / counted);
}

// Logits become the gradients of their rows' losses: softmax - 1 at the target. A thread for every P of
// a row.
KERNEL logit_gradients(X* logits, const u32* targets, const float* folds, u64 packs, u64 columns, u64 first) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    u64 row = at / columns, column = at % columns + first, target = targets[row];
    float most = folds[3 * row], inverse = 1.0f / folds[3 * row + 1], x[P];
    load(logits + at, x);
    for (int i = 0; i < P; i++) {
        float slope = expf(x[i] - most) * inverse - (column + i == target ? 1.0f : 0.0f);
        x[i] = target == IGNORED ? 0.0f : slope;
    }
    store(x, logits + at, 0);
}

// Multiplies each row by its weight. A thread for every P of a row.
KERNEL scale_rows(X* x, const float* weights, u64 packs, u64 width) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P];
    load(x + at, a);
    for (int i = 0; i < P; i++) a[i] *= weights[at / width];
    store(a, x + at, 0);
}

// A thread for every P elements.
KERNEL add_scaled(const float* sums, const float* gradient, float share, X* to, u64 packs, int add) {
    u64 at = thread() * P;
    if (at >= packs * P) return;
    float a[P];
    load(sums + at, a);
    for (int i = 0; i < P; i++) a[i] *= share * *gradient;
    store(a, to + at, add);
}
