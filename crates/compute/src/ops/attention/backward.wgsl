// Gradients of attention; see `shared.wgsli`.

fn gradient_line(sample: u32, head: u32, query: u32, along: u32) -> Eight {
    if query >= p.queries { return nothing(); }
    return gradient_eight(((sample * p.queries + query) * p.heads + head) * D + along, D - along);
}

fn gradient_tile(s: u32, h: u32, at: u32, along: u32) -> Tile {
    return tile(gradient_line(s, h, at, along), gradient_line(s, h, at + 1u, along),
                gradient_line(s, h, at + 2u, along), gradient_line(s, h, at + 3u, along),
                gradient_line(s, h, at + 4u, along), gradient_line(s, h, at + 5u, along),
                gradient_line(s, h, at + 6u, along), gradient_line(s, h, at + 7u, along));
}

// The weights of eight queries and eight keys, and the slopes of scale * q * k.
struct Found { weights: Tile, slopes: Tile }

fn find(sample: u32, head: u32, kv_head: u32, query: u32, key: u32, bounds: Bounds, most: Eight, delta: Eight) -> Found {
    var x = Tile();
    var y = Tile();
    for (var along = 0u; along < D; along += 8u) {
        x = add_product(x, k_tile(sample, kv_head, key, along), flipped(q_tile(sample, head, query, along)));
        y = add_product(y, v_tile(sample, kv_head, key, along), flipped(gradient_tile(sample, head, query, along)));
    }
    for (var i = 0u; i < 8u; i++) {
        let line = weights(score(line_of(x, i), bounds, head, query, key + i), most);
        let slope = times(p.scale, plus(line_of(y, i), times(-1.0, delta)));
        x = with_line(x, i, line);
        y = with_line(y, i, multiplied(line, slope));
    }
    return Found(x, y);
}

// The place of what is known of eight queries.
fn known_at(sample: u32, head: u32, query: u32) -> u32 { return (sample * p.heads + head) * p.queries + query; }

// A group for each 64 queries, head and sample. Finds delta on its way.
kernel attention_dq(q: [X by WIDE], k: [X by WIDE], v: [X by WIDE], gradient: [X by WIDE],
                    statistics: [f32 by KNOWN_WIDE], delta: mut [f32 by KNOWN_WIDE], dq: mut [X by WIDE],
                    result: [X by WIDE], lengths: [u32], firsts: [u32], relative: [f32], add: u32,
                    queries: u32, keys: u32, heads: u32, kv_heads: u32, scale: f32, is_causal: u32) {
    let at = place_of(group, p.queries, p.heads, WIDEST);
    let kv_head = at.head / (p.heads / p.kv_heads);
    let row = lane / 8u * 8u;
    let part = lane % 8u;
    let query = at.first + row;
    let column = at.column + 8u * part;
    var deltas = nothing();
    for (var along = 8u * part; along < D; along += 64u) {
        deltas = plus(deltas, line_products(result_tile(at.sample, at.head, query, along),
                                            gradient_tile(at.sample, at.head, query, along)));
    }
    deltas = sum_told(lane, deltas);
    let place = known_at(at.sample, at.head, query);
    if part == 0u && at.column == 0u && query < p.queries { put_delta_eight(place, deltas, known(query), 0u); }
    var most = nothing();
    if query < p.queries { most = statistics_eight(place, known(query)); }
    let bounds = bounds_of(at.sample, query);
    if lane == 0u { bound = seen(at.sample, min(at.first + ROWS, p.queries) - 1u); }
    let end = workgroupUniformLoad(&bound);
    var sums = Tile();
    var more = Tile();
    for (var key = 0u; key < end; key += ROWS) {
        let found = find(at.sample, at.head, kv_head, query, key + 8u * part, bounds, most, deltas);
        workgroupBarrier();
        hand_over(row, part, flipped(found.slopes));
        workgroupBarrier();
        for (var i = 0u; i < 8u; i++) {
            let rows = handed_tile(row, i);
            if column < D { sums = add_product(sums, rows, k_tile(at.sample, kv_head, key + 8u * i, column)); }
            if D > 64u && column + 64u < D {
                more = add_product(more, rows, k_tile(at.sample, kv_head, key + 8u * i, column + 64u));
            }
        }
    }
    put_tile(at, query, column, sums);
    if D > 64u { put_tile(at, query, column + 64u, more); }
}

fn result_line(sample: u32, head: u32, query: u32, along: u32) -> Eight {
    if query >= p.queries { return nothing(); }
    return result_eight(((sample * p.queries + query) * p.heads + head) * D + along, D - along);
}

fn result_tile(s: u32, h: u32, at: u32, along: u32) -> Tile {
    return tile(result_line(s, h, at, along), result_line(s, h, at + 1u, along), result_line(s, h, at + 2u, along),
                result_line(s, h, at + 3u, along), result_line(s, h, at + 4u, along),
                result_line(s, h, at + 5u, along), result_line(s, h, at + 6u, along),
                result_line(s, h, at + 7u, along));
}

// The product of each line with the other's, by which numbers of lines become those of places.
fn line_products(t: Tile, u: Tile) -> Eight {
    var sum = nothing();
    let x = flipped(t);
    let y = flipped(u);
    for (var i = 0u; i < 8u; i++) { sum = plus(sum, multiplied(line_of(x, i), line_of(y, i))); }
    return sum;
}

fn put_row(at: Place, query: u32, column: u32, x: Eight) {
    if query >= p.queries || column >= D { return; }
    put_dq_eight(((at.sample * p.queries + query) * p.heads + at.head) * D + column, x, D - column, p.add);
}

// A group for each 64 keys, head of keys and sample. A thread has eight keys and, in turn, all queries.
kernel attention_dkv(q: [X by WIDE], k: [X by WIDE], v: [X by WIDE], gradient: [X by WIDE],
                     statistics: [f32 by KNOWN_WIDE], delta: [f32 by KNOWN_WIDE], dk: mut [X by WIDE],
                     dv: mut [X by WIDE], lengths: [u32], firsts: [u32], relative: [f32], add_k: u32,
                     add_v: u32, queries: u32, keys: u32, heads: u32, kv_heads: u32, scale: f32,
                     is_causal: u32) {
    let at = place_of(group, p.keys, p.kv_heads, 64u);
    let shared_by = p.heads / p.kv_heads;
    let row = lane / 8u * 8u;
    let part = lane % 8u;
    let key = at.first + row;
    let column = at.column + 8u * part;
    var k_sums = Tile();
    var v_sums = Tile();
    for (var head = at.head * shared_by; head < (at.head + 1u) * shared_by; head++) {
        for (var first = 0u; first < p.queries; first += ROWS) {
            // The last of the queries sees the most.
            if p.is_causal != 0u && p.keys - p.queries + min(first + ROWS, p.queries) <= at.first { continue; }
            let query = first + 8u * part;
            let place = known_at(at.sample, head, query);
            var most = nothing();
            var deltas = nothing();
            if query < p.queries {
                most = statistics_eight(place, known(query));
                deltas = delta_eight(place, known(query));
            }
            let found = find(at.sample, head, at.head, query, key, bounds_of(at.sample, query), most, deltas);
            workgroupBarrier();
            hand_over(row, part, found.weights);
            workgroupBarrier();
            for (var i = 0u; i < 8u && column < D; i++) {
                v_sums = add_product(v_sums, handed_tile(row, i), gradient_tile(at.sample, head, first + 8u * i, column));
            }
            workgroupBarrier();
            hand_over(row, part, found.slopes);
            workgroupBarrier();
            for (var i = 0u; i < 8u && column < D; i++) {
                k_sums = add_product(k_sums, handed_tile(row, i), q_tile(at.sample, head, first + 8u * i, column));
            }
        }
    }
    is_value = 0u;
    put_tile(at, key, column, k_sums);
    is_value = 1u;
    put_tile(at, key, column, v_sums);
}

// Whether values are put, or keys.
var<private> is_value: u32;

fn put_row(at: Place, key: u32, column: u32, x: Eight) {
    if key >= p.keys || column >= D { return; }
    let place = key_at(at.sample, at.head, key, column);
    if is_value == 1u { put_dv_eight(place, x, D - column, p.add_v); } else { put_dk_eight(place, x, D - column, p.add_k); }
}
