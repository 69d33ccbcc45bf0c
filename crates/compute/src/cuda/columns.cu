// Sums over rows, column by column, for a vector of every so many rows:
//
//   out[vector, column] = sum over its rows of a * b'
//
// with b' = 1 without b, and else (b - mean) * inverse where the row's statistics are given.
// A block has 32 columns of one vector; its 32 warps share the rows, and warp 0 adds them up.

KERNEL sum_columns(const X* a, const X* b, const float* statistics, Y* out, u64 rows, u64 width,
                   u64 out_width, u64 out_first, int add) {
    __shared__ float parts[32][33];
    u32 column = threadIdx.x % 32, part = threadIdx.x / 32;
    u64 at = (u64)blockIdx.x * 32 + column, first = (u64)blockIdx.y * rows;
    float sum = 0.0f;
    if (at < width) {
        for (u64 row = first + part; row < first + rows; row += 32) {
            float x = to_f32(a[row * width + at]);
            if (b) {
                float y = to_f32(b[row * width + at]);
                if (statistics) y = (y - statistics[2 * row]) * statistics[2 * row + 1];
                x *= y;
            }
            sum += x;
        }
    }
    parts[part][column] = sum;
    __syncthreads();
    if (part == 0 && at < width) {
        float total = 0.0f;
        for (int i = 0; i < 32; i++) total += parts[i][column];
        put(&out[blockIdx.y * out_width + out_first + at], total, add);
    }
}

// The mean and 1 / std of each row, a warp for each.
KERNEL row_statistics(const X* x, float* statistics, u64 rows, u64 width, float epsilon) {
    u64 row = warp();
    if (row >= rows) return;
    x += row * width;
    float sum = 0.0f, squares = 0.0f;
    for (u64 i = lane(); i < width; i += 32) sum += to_f32(x[i]);
    float mean = warp_sum(sum) / width;
    for (u64 i = lane(); i < width; i += 32) {
        float distance = to_f32(x[i]) - mean;
        squares += distance * distance;
    }
    float inverse = 1.0f / sqrtf(warp_sum(squares) / width + epsilon);
    if (lane() == 0) {
        statistics[2 * row] = mean;
        statistics[2 * row + 1] = inverse;
    }
}
