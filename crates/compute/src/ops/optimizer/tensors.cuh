// What kernels on many tensors begin with.

// Some tensors that one launch works on, each in blocks of its own. Handed over as the last argument, by
// value; as large as in `cuda.rs`.
struct One {
    void* at[6];
    u64 n;     // numbers of it
    u64 first; // of its blocks among all
};
struct Many { u64 count; One tensors[48]; };

// The tensor that this block belongs to, and the block's number among the tensor's.
DEVICE const One& of_block(const Many& many, u64& block) {
    u64 low = 0, high = many.count - 1;
    while (low < high) {
        u64 middle = (low + high + 1) / 2;
        if (many.tensors[middle].first <= blockIdx.x) low = middle; else high = middle - 1;
    }
    block = blockIdx.x - many.tensors[low].first;
    return many.tensors[low];
}

// What gradients are multiplied by. The norm is read where it was found; one that is not finite makes
// the step change nothing.
DEVICE bool step_scale(const float* norm, float most, float& scale) {
    if (!norm) return true;
    float length = scale * *norm, share = most / (length + 1e-6f);
    scale *= share < 1.0f ? share : 1.0f;
    return length - length == 0.0f;
}

// Numbers beside each other that are read at once; tensors and shares begin at multiples of them.
struct alignas(16) Four { float x[4]; };
DEVICE Four& four(float* at) { return *(Four*)at; }
DEVICE const Four& four(const float* at) { return *(const Four*)at; }

