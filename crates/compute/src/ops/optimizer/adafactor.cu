// Adafactor, a parameter at a time: means of squares by row and by column, or of each element, then the size of the step,
// then the step. `length` is what the step is multiplied by, and then what a parameter loses of itself.

// A block for each row.
KERNEL adafactor_rows(const float* gradient, float* rows, u64 columns, float keeps, float news, float epsilon,
                      const float* norm, float most, float scale) {
    if (!step_scale(norm, most, scale)) return;
    const float* row = gradient + blockIdx.x * columns;
    double sum = 0.0;
    for (u64 at = threadIdx.x; at < columns; at += blockDim.x) {
        float g = scale * row[at];
        sum += (double)g * g;
    }
    sum = block_sum(sum);
    if (threadIdx.x != 0) return;
    rows[blockIdx.x] = rows[blockIdx.x] * keeps + ((float)(sum / columns) + epsilon) * news;
}

// A block for `tile` columns of a matrix, whose other threads share its rows.
KERNEL adafactor_columns(const float* gradient, float* means, u64 rows, u64 columns, u64 tile, float keeps, float news,
                         float epsilon, const float* norm, float most, float scale) {
    if (!step_scale(norm, most, scale)) return;
    __shared__ double parts[1024];
    u64 tiles = (columns + tile - 1) / tile, matrix = blockIdx.x / tiles;
    u64 column = blockIdx.x % tiles * tile + threadIdx.x % tile;
    const float* from = gradient + matrix * rows * columns;
    double sum = 0.0;
    if (column < columns) {
        for (u64 row = threadIdx.x / tile; row < rows; row += blockDim.x / tile) {
            float g = scale * from[row * columns + column];
            sum += (double)g * g;
        }
    }
    parts[threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.x >= tile || column >= columns) return;
    for (u64 i = threadIdx.x + tile; i < blockDim.x; i += tile) sum += parts[i];
    float& mean = means[matrix * columns + column];
    mean = mean * keeps + ((float)(sum / rows) + epsilon) * news;
}

KERNEL adafactor_whole(const float* gradient, float* second, u64 n, float keeps, float news, float epsilon,
                       const float* norm, float most, float scale) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    float g = scale * gradient[at];
    second[at] = second[at] * keeps + (g * g + epsilon) * news;
}

// A block for each matrix.
KERNEL adafactor_row_mean(const float* rows, u64 n, float* mean) {
    double sum = 0.0;
    for (u64 i = threadIdx.x; i < n; i += blockDim.x) sum += rows[blockIdx.x * n + i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) mean[blockIdx.x] = (float)(sum / n);
}

// What a step is proportional to at a place, of whole or of factored moments.
DEVICE float direction_at(u64 at, float g, const float* rows, const float* columns, const float* mean, u64 n_rows,
                          u64 n_columns) {
    if (!columns) return g / sqrtf(rows[at]);
    u64 row = at / n_columns, column = at % n_columns, matrix = row / n_rows;
    return g / sqrtf(rows[row] / mean[matrix]) / sqrtf(columns[matrix * n_columns + column]);
}

// A block for every `share` elements writes the sums of the squares of the direction and of the parameter.
KERNEL adafactor_squares(const float* param, const float* gradient, const float* rows, const float* columns,
                         const float* mean, u64 n_rows, u64 n_columns, double* partial, u64 n, u64 share,
                         const float* norm, float most, float scale) {
    u64 begin = blockIdx.x * share, end = begin + share < n ? begin + share : n;
    double along = 0.0, size = 0.0;
    if (step_scale(norm, most, scale)) {
        for (u64 at = begin + threadIdx.x; at < end; at += blockDim.x) {
            float x = direction_at(at, scale * gradient[at], rows, columns, mean, n_rows, n_columns);
            along += (double)x * x;
            size += (double)param[at] * param[at];
        }
    }
    along = block_sum(along);
    size = block_sum(size);
    if (threadIdx.x == 0) {
        partial[2 * blockIdx.x] = along;
        partial[2 * blockIdx.x + 1] = size;
    }
}

// One block.
KERNEL adafactor_length(const double* partial, u64 blocks, u64 n, float* length, float rate, float decay,
                        float least_size, float threshold, int by_size) {
    double along = 0.0, size = 0.0;
    for (u64 i = threadIdx.x; i < blocks; i += blockDim.x) {
        along += partial[2 * i];
        size += partial[2 * i + 1];
    }
    along = block_sum(along);
    size = block_sum(size);
    if (threadIdx.x != 0) return;
    if (by_size) rate *= larger((float)sqrt(size / n), least_size);
    length[0] = rate / larger((float)sqrt(along / n) / threshold, 1.0f);
    length[1] = rate * decay;
}

KERNEL adafactor_apply(float* param, const float* gradient, const float* rows, const float* columns, const float* mean,
                       u64 n_rows, u64 n_columns, const float* length, u64 n, const float* norm, float most,
                       float scale) {
    u64 at = thread();
    if (at >= n || !step_scale(norm, most, scale)) return;
    float x = direction_at(at, scale * gradient[at], rows, columns, mean, n_rows, n_columns);
    param[at] -= param[at] * length[1] + length[0] * x;
}
