// Gradients of attention, in f32 for heads of D numbers; see `kernel.wgsl`. Queries with the gradient of
// the result, and keys with values, lie in shared memory as blocks of T rows.

const PER_ROW: u32 = THREADS / T;
const PER_THREAD: u32 = (D + PER_ROW - 1u) / PER_ROW;
const WIDE: u32 = D + 1u;
const HIGH: u32 = T + 1u;

var<workgroup> queries_now: array<f32, T * WIDE>;
var<workgroup> gradients_now: array<f32, T * WIDE>;
var<workgroup> keys_now: array<f32, T * WIDE>;
var<workgroup> values_now: array<f32, T * WIDE>;
// Of a query and a key: the weight, and the slope of scale * q * k.
var<workgroup> weights: array<f32, T * HIGH>;
var<workgroup> slopes: array<f32, T * HIGH>;
var<workgroup> bound: u32;

// Rows that are not there are zeros.
fn load_queries(lane: u32, sample: u32, head: u32, first: u32, count: u32) {
    let start = (sample * p.queries + first) * p.heads * D + head * D;
    for (var i = lane; i < T * D; i += THREADS) {
        let r = i / D;
        let at = start + min(r, count - 1u) * p.heads * D + i % D;
        queries_now[r * WIDE + i % D] = select(0.0, q(at), r < count);
        gradients_now[r * WIDE + i % D] = select(0.0, gradient(at), r < count);
    }
}

fn load_keys(lane: u32, sample: u32, kv_head: u32, key: u32) {
    let n = min(T, p.keys - key);
    let start = (sample * p.keys + key) * p.kv_heads * D + kv_head * D;
    for (var i = lane; i < T * D; i += THREADS) {
        let r = i / D;
        let at = start + min(r, n - 1u) * p.kv_heads * D + i % D;
        keys_now[r * WIDE + i % D] = select(0.0, k(at), r < n);
        values_now[r * WIDE + i % D] = select(0.0, v(at), r < n);
    }
}

// The weights and slopes of all that lies in shared memory.
fn find_slopes(lane: u32, sample: u32, head: u32, first: u32, count: u32, key: u32) {
    let row = lane / PER_ROW;
    let at = (sample * p.heads + head) * p.queries + first + min(row, count - 1u);
    let sees = select(0u, seen(sample, first + row), row < count);
    let begins = first_seen(sample, first + min(row, count - 1u));
    for (var i = lane % PER_ROW; i < T; i += PER_ROW) {
        var weight = 0.0;
        var slope = 0.0;
        if key + i >= begins && key + i < sees {
            var product = 0.0;
            var along = 0.0;
            for (var j = 0u; j < D; j++) {
                product += queries_now[row * WIDE + j] * keys_now[i * WIDE + j];
                along += gradients_now[row * WIDE + j] * values_now[i * WIDE + j];
            }
            let x = p.scale * product + relative_bias(head, first + row, key + i);
            weight = exponential(x - statistics(at));
            slope = weight * (along - delta(at)) * p.scale;
        }
        weights[row * HIGH + i] = weight;
        slopes[row * HIGH + i] = slope;
    }
}

// A group for each T queries, head and sample.
kernel attention_dq(q: [X], k: [X], v: [X], gradient: [X], statistics: [f32], delta: [f32],
                    dq: mut [X], lengths: [u32], firsts: [u32], relative: [f32], add: u32, queries: u32, keys: u32,
                    heads: u32, kv_heads: u32, scale: f32, is_causal: u32) {
    let blocks = (p.queries + T - 1u) / T;
    let first = group % blocks * T;
    let head = group / blocks % p.heads;
    let sample = group / blocks / p.heads;
    let kv_head = head / (p.heads / p.kv_heads);
    let count = min(T, p.queries - first);
    let row = lane / PER_ROW;
    let part = lane % PER_ROW;
    load_queries(lane, sample, head, first, count);
    if lane == 0u { bound = seen(sample, first + count - 1u); }
    let end = workgroupUniformLoad(&bound);
    var sums = array<f32, PER_THREAD>();
    for (var key = 0u; key < end; key += T) {
        workgroupBarrier();
        load_keys(lane, sample, kv_head, key);
        workgroupBarrier();
        find_slopes(lane, sample, head, first, count, key);
        workgroupBarrier();
        for (var j = 0u; j < PER_THREAD; j++) {
            let column = min(part + j * PER_ROW, D - 1u);
            for (var i = 0u; i < T; i++) { sums[j] += slopes[row * HIGH + i] * keys_now[i * WIDE + column]; }
        }
    }
    workgroupBarrier();
    for (var j = 0u; j < PER_THREAD; j++) {
        let column = part + j * PER_ROW;
        if column < D { queries_now[row * WIDE + column] = sums[j]; }
    }
    workgroupBarrier();
    let start = (sample * p.queries + first) * p.heads * D + head * D;
    let pairs = (D + 1u) / 2u;
    for (var i = lane; i < count * pairs; i += THREADS) {
        let place = i / pairs * WIDE + 2u * (i % pairs);
        let both = 2u * (i % pairs) + 1u < D;
        let value = vec2<f32>(queries_now[place], queries_now[place + select(0u, 1u, both)]);
        put_dq_pair(start + i / pairs * p.heads * D + 2u * (i % pairs), value, both, p.add);
    }
}

// A group for each T keys, head of keys and sample.
kernel attention_dkv(q: [X], k: [X], v: [X], gradient: [X], statistics: [f32], delta: [f32],
                     dk: mut [X], dv: mut [X], lengths: [u32], firsts: [u32], relative: [f32], add_k: u32, add_v: u32,
                     queries: u32, keys: u32, heads: u32, kv_heads: u32, scale: f32, is_causal: u32) {
    let blocks = (p.keys + T - 1u) / T;
    let key = group % blocks * T;
    let kv_head = group / blocks % p.kv_heads;
    let sample = group / blocks / p.kv_heads;
    let shared_by = p.heads / p.kv_heads;
    let row = lane / PER_ROW;
    let part = lane % PER_ROW;
    load_keys(lane, sample, kv_head, key);
    var k_sums = array<f32, PER_THREAD>();
    var v_sums = array<f32, PER_THREAD>();
    for (var head = kv_head * shared_by; head < (kv_head + 1u) * shared_by; head++) {
        for (var first = 0u; first < p.queries; first += T) {
            let count = min(T, p.queries - first);
            // The last of the queries sees the most.
            if p.is_causal != 0u && p.keys - p.queries + first + count <= key { continue; }
            workgroupBarrier();
            load_queries(lane, sample, head, first, count);
            workgroupBarrier();
            find_slopes(lane, sample, head, first, count, key);
            workgroupBarrier();
            for (var j = 0u; j < PER_THREAD; j++) {
                let column = min(part + j * PER_ROW, D - 1u);
                for (var i = 0u; i < T; i++) {
                    v_sums[j] += weights[i * HIGH + row] * gradients_now[i * WIDE + column];
                    k_sums[j] += slopes[i * HIGH + row] * queries_now[i * WIDE + column];
                }
            }
        }
    }
    workgroupBarrier();
    for (var j = 0u; j < PER_THREAD; j++) {
        let column = part + j * PER_ROW;
        if column < D {
            keys_now[row * WIDE + column] = k_sums[j];
            values_now[row * WIDE + column] = v_sums[j];
        }
    }
    workgroupBarrier();
    let start = (sample * p.keys + key) * p.kv_heads * D + kv_head * D;
    let pairs = (D + 1u) / 2u;
    for (var i = lane; i < min(T, p.keys - key) * pairs; i += THREADS) {
        let place = i / pairs * WIDE + 2u * (i % pairs);
        let both = 2u * (i % pairs) + 1u < D;
        let at = start + i / pairs * p.kv_heads * D + 2u * (i % pairs);
        let next = place + select(0u, 1u, both);
        put_dk_pair(at, vec2<f32>(keys_now[place], keys_now[next]), both, p.add_k);
        put_dv_pair(at, vec2<f32>(values_now[place], values_now[next]), both, p.add_v);
    }
}
