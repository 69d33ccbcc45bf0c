// Images as tokens and back, a thread for each element of the image. One kernel does both: what lies
// where is the same, only the direction differs.

KERNEL patchify(X* image, X* tokens, u64 n, u64 channels, u64 height, u64 width, u64 patch,
                u64 of_channel, u64 of_row, u64 of_column, int back) {
    u64 at = thread();
    if (at >= n) return;
    u64 column = at % width, row = at / width % height, channel = at / width / height % channels;
    u64 sample = at / width / height / channels;
    u64 across = width / patch, down = height / patch;
    u64 token = (sample * down + row / patch) * across + column / patch;
    u64 place = channel * of_channel + row % patch * of_row + column % patch * of_column;
    u64 to = token * channels * patch * patch + place;
    if (back) image[at] = tokens[to]; else tokens[to] = image[at];
}
