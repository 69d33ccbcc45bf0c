// Means over squares, a thread for each pixel of the result. Rows of all planes follow each other, and
// the squares divide them: so a row of the result starts at `size` times its number.

KERNEL avg_pool(const X* x, X* y, u64 n, u64 narrow, u64 size) {
    u64 at = thread();
    if (at >= n) return;
    u64 row = at / narrow, column = at % narrow, width = narrow * size;
    const X* square = x + row * size * width + column * size;
    float sum = 0.0f;
    for (u64 i = 0; i < size; i++) {
        for (u64 j = 0; j < size; j++) sum += to_f32(square[i * width + j]);
    }
    y[at] = from_f32<X>(sum * (1.0f / (size * size)));
}
