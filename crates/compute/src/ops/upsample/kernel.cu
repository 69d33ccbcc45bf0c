// Enlarging images, a thread for each pixel of the result.

KERNEL upsample(const X* x, X* y, u64 n, u64 wide, u64 factor) {
    u64 at = thread();
    if (at >= n) return;
    u64 row = at / wide, column = at % wide;
    y[at] = x[row / factor * (wide / factor) + column / factor];
}
