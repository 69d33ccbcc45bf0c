// Attention in f32 for heads of D numbers. Blocks of T queries meet blocks of T keys in shared memory; the
// 256 threads share the rows evenly, and each holds its part of the row's sums. Nothing is added up in an
// order that changes, so gradients of queries and of keys are found by kernels of their own.
//
// q, out and gradients of it are [samples, queries, heads * D], k and v [samples, keys, kv_heads * D],
// statistics (the logarithm of each softmax's denominator) and delta (the sum of out * its gradient)
// [samples, heads, queries].

const PER_ROW: u32 = THREADS / T;
// Numbers of a row that a thread has, and the width of a row in shared memory.
const PER_THREAD: u32 = (D + PER_ROW - 1u) / PER_ROW;
const WIDE: u32 = D + 1u;

var<workgroup> own: array<f32, T * WIDE>;
var<workgroup> other: array<f32, T * WIDE>;
var<workgroup> products: array<f32, T * (T + 1u)>;
var<workgroup> bound: u32;

// The product of a row of each block.
fn dot_rows(a: u32, b: u32) -> f32 {
    var sum = 0.0;
    for (var i = 0u; i < D; i++) { sum += own[a * WIDE + i] * other[b * WIDE + i]; }
    return sum;
}

// A group for each T queries, head and sample.
kernel attention(q: [X], k: [X], v: [X], result: mut [X], statistics: mut [f32], lengths: [u32],
                 firsts: [u32], relative: [f32], queries: u32, keys: u32, heads: u32, kv_heads: u32, scale: f32,
                 is_causal: u32) {
    let blocks = (p.queries + T - 1u) / T;
    let first = group % blocks * T;
    let head = group / blocks % p.heads;
    let sample = group / blocks / p.heads;
    let kv_head = head / (p.heads / p.kv_heads);
    let count = min(T, p.queries - first);
    let row = lane / PER_ROW;
    let part = lane % PER_ROW;
    let start = (sample * p.queries + first) * p.heads * D + head * D;
    for (var i = lane; i < T * D; i += THREADS) {
        let r = i / D;
        own[r * WIDE + i % D] = select(0.0, q(start + min(r, count - 1u) * p.heads * D + i % D), r < count);
    }
    if lane == 0u { bound = seen(sample, first + count - 1u); }
    let end = workgroupUniformLoad(&bound);
    let sees = select(0u, seen(sample, first + row), row < count);
    let begins = first_seen(sample, first + min(row, count - 1u));
    var sums = array<f32, PER_THREAD>();
    var most = LOWEST;
    var total = 0.0;
    for (var key = 0u; key < end; key += T) {
        let n = min(T, p.keys - key);
        let keys_at = (sample * p.keys + key) * p.kv_heads * D + kv_head * D;
        workgroupBarrier();
        for (var i = lane; i < T * D; i += THREADS) {
            let r = i / D;
            other[r * WIDE + i % D] = select(0.0, k(keys_at + min(r, n - 1u) * p.kv_heads * D + i % D), r < n);
        }
        workgroupBarrier();
        for (var i = part; i < T; i += PER_ROW) {
            var x = LOWEST;
            if key + i >= begins && key + i < sees {
                x = p.scale * dot_rows(row, i) + relative_bias(head, first + row, key + i);
            }
            products[row * (T + 1u) + i] = x;
        }
        workgroupBarrier();
        for (var i = lane; i < T * D; i += THREADS) {
            let r = i / D;
            other[r * WIDE + i % D] = select(0.0, v(keys_at + min(r, n - 1u) * p.kv_heads * D + i % D), r < n);
        }
        // Every thread of a row finds the same largest product.
        var now = most;
        for (var i = 0u; i < T; i++) { now = larger(now, products[row * (T + 1u) + i]); }
        let fade = exponential(most - now);
        most = now;
        workgroupBarrier();
        for (var i = part; i < T; i += PER_ROW) {
            let at = row * (T + 1u) + i;
            let is_seen = key + i >= begins && key + i < sees;
            products[at] = select(0.0, exponential(products[at] - now), is_seen);
        }
        workgroupBarrier();
        total *= fade;
        for (var i = 0u; i < T; i++) { total += products[row * (T + 1u) + i]; }
        for (var j = 0u; j < PER_THREAD; j++) {
            let column = min(part + j * PER_ROW, D - 1u);
            var sum = 0.0;
            for (var i = 0u; i < T; i++) { sum += products[row * (T + 1u) + i] * other[i * WIDE + column]; }
            sums[j] = sums[j] * fade + sum;
        }
    }
    // Two numbers of a row are stored at a time, so they meet in shared memory first.
    workgroupBarrier();
    var inverse = 0.0;
    if total != 0.0 { inverse = 1.0 / total; }
    for (var j = 0u; j < PER_THREAD; j++) {
        let column = part + j * PER_ROW;
        if column < D { own[row * WIDE + column] = sums[j] * inverse; }
    }
    if part == 0u && row < count {
        set_statistics((sample * p.heads + head) * p.queries + first + row, most + logarithm(total));
    }
    workgroupBarrier();
    let pairs = (D + 1u) / 2u;
    for (var i = lane; i < count * pairs; i += THREADS) {
        let r = i / pairs;
        let column = 2u * (i % pairs);
        let both = column + 1u < D;
        let value = vec2<f32>(own[r * WIDE + column], own[r * WIDE + column + select(0u, 1u, both)]);
        set_result_pair(start + r * p.heads * D + column, value, both);
    }
}

// A thread for each query and head.
kernel attention_delta(result: [X], gradient: [X], delta: mut [f32], n: u32, queries: u32, heads: u32,
                       lengths: [u32], firsts: [u32], relative: [f32], keys: u32, is_causal: u32) {
    if thread >= p.n { return; }
    let query = thread % p.queries;
    let head = thread / p.queries % p.heads;
    let sample = thread / p.queries / p.heads;
    let start = ((sample * p.queries + query) * p.heads + head) * D;
    var sum = 0.0;
    for (var i = 0u; i < D; i++) { sum += result(start + i) * gradient(start + i); }
    set_delta(thread, sum);
}
