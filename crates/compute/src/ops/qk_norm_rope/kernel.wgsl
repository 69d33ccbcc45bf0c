// Norm and rotation of heads of D numbers, of which the first p.rotary are turned. PER_ROW threads for each head, which
// lies in shared memory while it is turned, since the two numbers of a pair may be read by different threads.

var<workgroup> heads_now: array<f32, THREADS / PER_ROW * D>;

// A number of this thread's head.
fn now(lane: u32, i: u32) -> f32 { return heads_now[lane / PER_ROW * D + i]; }
fn set_now(lane: u32, i: u32, x: f32) { heads_now[lane / PER_ROW * D + i] = x; }

// The number at i once its pair is turned, forth or back.
fn turned(lane: u32, head: u32, i: u32, sign: f32) -> f32 {
    let own = now(lane, i);
    if !has_table() || i >= p.rotary { return own; }
    let half = p.rotary / 2u;
    let is_second = select((i & 1u) == 1u, i >= half, p.half_split != 0u);
    let pair = select(i / 2u, i % half, p.half_split != 0u);
    let partner = select(i ^ 1u, (i + half) % p.rotary, p.half_split != 0u);
    // Where samples share a table it has a row per token.
    let angles = head / p.n_heads % p.table_rows * p.rotary + 2u * pair;
    let sine = sign * table(angles + 1u);
    return own * table(angles) + select(-sine, sine, is_second) * now(lane, partner);
}

kernel qk_norm_rope(x: [X], weight: [f32], table: [f32], y: mut [X], heads: u32, n_heads: u32,
                    table_rows: u32, rotary: u32, half_split: u32, epsilon: f32) {
    let head = thread / PER_ROW;
    let first = head * D;
    let end = select(0u, D, head < p.heads);
    var squares = 0.0;
    for (var i = lane % PER_ROW; i < end; i += PER_ROW) {
        let number = x(first + i);
        squares += number * number;
        set_now(lane, i, number);
    }
    if has_weight() {
        let inverse = 1.0 / sqrt(row_sum(lane, squares) / f32(D) + p.epsilon);
        for (var i = lane % PER_ROW; i < end; i += PER_ROW) { set_now(lane, i, now(lane, i) * inverse * weight(i)); }
    }
    workgroupBarrier();
    for (var i = 2u * (lane % PER_ROW); i < end; i += 2u * PER_ROW) {
        let both = i + 1u < end;
        let second = turned(lane, head, select(i, i + 1u, both), 1.0);
        set_y_pair(first + i, vec2<f32>(turned(lane, head, i, 1.0), second), both);
    }
}

// In place: the gradient of the result becomes that of x. A workgroup goes through a share of the heads, some at a time.
// If the gradient of the weight is wanted, the workgroup leaves its sum of gradient * xn, the gradient turned back, in a
// row of `partial` [workgroups, D], which another kernel adds up.
kernel qk_norm_rope_backward(x: [X], weight: [f32], table: [f32], gradient: mut [X], partial: mut [f32],
                             heads: u32, share: u32, n_heads: u32, table_rows: u32, rotary: u32,
                             half_split: u32, epsilon: f32) {
    let last = min((group + 1u) * p.share, p.heads);
    var sums = array<f32, (D + PER_ROW - 1u) / PER_ROW>();
    for (var turn = group * p.share; turn < last; turn += THREADS / PER_ROW) {
        let head = turn + lane / PER_ROW;
        let first = head * D;
        let end = select(0u, D, head < last);
        for (var i = lane % PER_ROW; i < end; i += PER_ROW) { set_now(lane, i, gradient(first + i)); }
        workgroupBarrier();
        var inverse = 1.0;
        var slope = 0.0;
        if has_weight() {
            var squares = 0.0;
            var along = 0.0;
            for (var i = lane % PER_ROW; i < end; i += PER_ROW) {
                let number = x(first + i);
                squares += number * number;
                along += turned(lane, head, i, -1.0) * weight(i) * number;
            }
            inverse = 1.0 / sqrt(row_sum(lane, squares) / f32(D) + p.epsilon);
            slope = row_sum(lane, along) * inverse / f32(D);
        }
        for (var i = lane % PER_ROW; has_partial() && i < end; i += PER_ROW) {
            sums[i / PER_ROW] += turned(lane, head, i, -1.0) * x(first + i) * inverse;
        }
        for (var i = 2u * (lane % PER_ROW); i < end; i += 2u * PER_ROW) {
            let both = i + 1u < end;
            let second = one(lane, head, select(i, i + 1u, both), inverse, slope);
            set_gradient_pair(first + i, vec2<f32>(one(lane, head, i, inverse, slope), second), both);
        }
        workgroupBarrier();
    }
    if !has_partial() { return; }
    for (var i = lane % PER_ROW; i < D; i += PER_ROW) { set_now(lane, i, sums[i / PER_ROW]); }
    workgroupBarrier();
    for (var i = lane; i < D; i += THREADS) {
        var total = 0.0;
        for (var row = 0u; row < THREADS / PER_ROW; row++) { total += heads_now[row * D + i]; }
        set_partial(group * D + i, total);
    }
}

fn one(lane: u32, head: u32, i: u32, inverse: f32, slope: f32) -> f32 {
    let g = turned(lane, head, i, -1.0);
    if !has_weight() { return g; }
    return (g * weight(i) - x(head * D + i) * inverse * slope) * inverse;
}
