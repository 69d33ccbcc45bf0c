// Attention: 64 queries of a head go through all keys that any of them sees.

fn larger_of(a: vec4<f32>, b: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(larger(a.x, b.x), larger(a.y, b.y), larger(a.z, b.z), larger(a.w, b.w));
}

fn larger_eight(a: Eight, b: Eight) -> Eight { return Eight(larger_of(a.low, b.low), larger_of(a.high, b.high)); }

fn inverse(x: vec4<f32>) -> vec4<f32> { return select(1.0 / x, vec4<f32>(0.0), x == vec4<f32>(0.0)); }

fn put_row(what: u32, at: Place, query: u32, column: u32, x: Eight) {
    if query >= p.queries || column >= D { return; }
    set_result_eight(query_at(at.sample, at.head, query, column), x, D - column);
}

fn logarithms_of(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(logarithm(x.x), logarithm(x.y), logarithm(x.z), logarithm(x.w));
}

// A workgroup for each 64 queries, head and sample.
kernel attention(q: [X by WIDE], k: [X by WIDE], v: [X by WIDE], result: mut [X by WIDE],
                 statistics: mut [f32 by KNOWN_WIDE], lengths: [u32], firsts: [u32], relative: [f32], queries: u32,
                 keys: u32, heads: u32, kv_heads: u32, scale: f32, is_causal: u32) {
    let at = place_of(group, p.queries, p.heads, WIDEST);
    let kv_head = at.head / (p.heads / p.kv_heads);
    let row = lane / 8u * 8u;
    let part = lane % 8u;
    let query = at.first + row;
    let column = at.column + 8u * part;
    let bounds = bounds_of(at.sample, query);
    var sums = Tile();
    var more = Tile();
    var most = Eight(vec4<f32>(LOWEST), vec4<f32>(LOWEST));
    var total = nothing();
    if lane == 0u { bound = seen(at.sample, min(at.first + ROWS, p.queries) - 1u); }
    let end = workgroupUniformLoad(&bound);
    for (var key = 0u; key < end; key += ROWS) {
        var x = Tile();
        for (var along = 0u; along < D; along += 8u) {
            x = add_matmul(x, k_tile(at.sample, kv_head, key + 8u * part, along),
                            flipped(q_tile(at.sample, at.head, query, along)));
        }
        var now = most;
        for (var i = 0u; i < 8u; i++) {
            let line = score(line_of(x, i), bounds, at.head, query, key + 8u * part + i);
            now = larger_eight(now, line);
            x = with_line(x, i, line);
        }
        told[lane] = now;
        workgroupBarrier();
        for (var i = row; i < row + 8u; i++) { now = larger_eight(now, told[i]); }
        let fade = Eight(exponentials(most.low - now.low), exponentials(most.high - now.high));
        most = now;
        total = multiplied(total, fade);
        for (var i = 0u; i < 8u; i++) {
            let line = weights(line_of(x, i), now);
            total = plus(total, line);
            x = with_line(x, i, line);
        }
        hand_over(row, part, flipped(x));
        workgroupBarrier();
        sums = lines_times(sums, fade);
        if D > 64u { more = lines_times(more, fade); }
        for (var i = 0u; i < 8u; i++) {
            let rows = handed_tile(row, i);
            if column < D { sums = add_matmul(sums, rows, v_tile(at.sample, kv_head, key + 8u * i, column)); }
            if D > 64u && column + 64u < D {
                more = add_matmul(more, rows, v_tile(at.sample, kv_head, key + 8u * i, column + 64u));
            }
        }
    }
    total = sum_told(lane / 8u, part, total);
    let inverses = Eight(inverse(total.low), inverse(total.high));
    put_tile(QUERIES, at, query, column, lines_times(sums, inverses));
    if D > 64u { put_tile(QUERIES, at, query, column + 64u, lines_times(more, inverses)); }
    if part != 0u || at.column != 0u || query >= p.queries { return; }
    let place = (at.sample * p.heads + at.head) * p.queries + query;
    let logarithms = Eight(logarithms_of(total.low), logarithms_of(total.high));
    set_statistics_eight(place, plus(most, logarithms), known(query));
}
