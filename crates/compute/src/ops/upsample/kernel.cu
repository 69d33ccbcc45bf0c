// Enlarging images and clips, a thread for each pixel of the result.

KERNEL upsample(const X* x, X* y, u64 n, u64 frames, u64 all_frames, u64 tall, u64 wide, u64 times, u64 side) {
    u64 at = thread();
    if (at >= n) return;
    u64 line = at / wide, column = at % wide / side, plane = line / tall, row = line % tall / side;
    u64 frame = (plane % all_frames + times - 1) / times, from = plane / all_frames * frames + frame;
    y[at] = x[(from * (tall / side) + row) * (wide / side) + column];
}
