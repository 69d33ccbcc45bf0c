// Times memory: all of it read, all of it written, sixteen bytes at a time.

KERNEL sum_words(const uint4* from, u64 n, u32* sums) {
    u32 sum = 0;
    for (u64 at = thread(); at < n; at += (u64)gridDim.x * blockDim.x) {
        uint4 words = from[at];
        sum += words.x + words.y + words.z + words.w;
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

KERNEL set_words(uint4* to, u64 n, u32 word) {
    for (u64 at = thread(); at < n; at += (u64)gridDim.x * blockDim.x) {
        to[at] = make_uint4(word, word, word, word);
    }
}
