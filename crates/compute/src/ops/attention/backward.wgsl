// Gradients of attention; see `shared.wgsli`. Nothing is added up in an order that changes, so some workgroups find the
// gradients of 64 queries and others those of 64 keys and their values, and both compute the scores. They are one
// launch, in which those that read the same head lie beside each other: what one has read, others find in the cache.

fn gradient_line(sample: u32, head: u32, query: u32, along: u32) -> Eight {
    if query >= p.queries { return nothing(); }
    return gradient_eight(query_at(sample, head, query, along), D - along);
}

fn gradient_tile(s: u32, h: u32, at: u32, along: u32) -> Tile {
    return tile(gradient_line(s, h, at, along), gradient_line(s, h, at + 1u, along),
                gradient_line(s, h, at + 2u, along), gradient_line(s, h, at + 3u, along),
                gradient_line(s, h, at + 4u, along), gradient_line(s, h, at + 5u, along),
                gradient_line(s, h, at + 6u, along), gradient_line(s, h, at + 7u, along));
}

fn result_line(sample: u32, head: u32, query: u32, along: u32) -> Eight {
    if query >= p.queries { return nothing(); }
    return result_eight(query_at(sample, head, query, along), D - along);
}

fn result_tile(s: u32, h: u32, at: u32, along: u32) -> Tile {
    return tile(result_line(s, h, at, along), result_line(s, h, at + 1u, along), result_line(s, h, at + 2u, along),
                result_line(s, h, at + 3u, along), result_line(s, h, at + 4u, along),
                result_line(s, h, at + 5u, along), result_line(s, h, at + 6u, along),
                result_line(s, h, at + 7u, along));
}

// The dot product of each line with the other's: a value for each line.
fn line_dots(t: Tile, u: Tile) -> Eight {
    var sum = nothing();
    let x = flipped(t);
    let y = flipped(u);
    for (var i = 0u; i < 8u; i++) { sum = plus(sum, multiplied(line_of(x, i), line_of(y, i))); }
    return sum;
}

// What is known of eight queries: the logarithm of the denominator, and delta, the sum of result * gradient, of which
// each of a team of eight threads finds a part. Kept nowhere: reading the result again is little beside the scores.
struct Known { most: Eight, delta: Eight }

fn known_of(sample: u32, head: u32, query: u32, team: u32, place: u32) -> Known {
    var sums = nothing();
    for (var along = 8u * place; along < D; along += 64u) {
        sums = plus(sums, line_dots(result_tile(sample, head, query, along),
                                        gradient_tile(sample, head, query, along)));
    }
    var most = nothing();
    if query < p.queries { most = statistics_eight((sample * p.heads + head) * p.queries + query, known(query)); }
    return Known(most, sum_told(team, place, sums));
}

// The weights of eight queries and eight keys, and the gradients of scale * q * k.
struct Found { weights: Tile, slopes: Tile }

fn find(sample: u32, head: u32, kv_head: u32, query: u32, key: u32, bounds: Bounds, about: Known) -> Found {
    var x = Tile();
    var y = Tile();
    for (var along = 0u; along < D; along += 8u) {
        x = add_matmul(x, k_tile(sample, kv_head, key, along), flipped(q_tile(sample, head, query, along)));
        y = add_matmul(y, v_tile(sample, kv_head, key, along), flipped(gradient_tile(sample, head, query, along)));
    }
    for (var i = 0u; i < 8u; i++) {
        let line = weights(score(line_of(x, i), bounds, head, query, key + i), about.most);
        let slope = times(p.scale, plus(line_of(y, i), times(-1.0, about.delta)));
        x = with_line(x, i, line);
        y = with_line(y, i, multiplied(line, slope));
    }
    return Found(x, y);
}

// A head of keys and the queries that share it have workgroups in a row, with those of keys spread evenly among them:
// these last longer, and a launch may be cut anywhere.
kernel attention_backward(q: [X by WIDE], k: [X by WIDE], v: [X by WIDE], gradient: [X by WIDE],
                          result: [X by WIDE], statistics: [f32 by KNOWN_WIDE], dq: mut [X by WIDE],
                          dk: mut [X by WIDE], dv: mut [X by WIDE], lengths: [u32], firsts: [u32],
                          relative: [f32], add_q: u32, add_k: u32, add_v: u32, queries: u32, keys: u32,
                          heads: u32, kv_heads: u32, scale: f32, is_causal: u32) {
    let of_keys = groups_of(p.keys, WIDEST_OF_KEYS);
    let of_queries = p.heads / p.kv_heads * groups_of(p.queries, WIDEST);
    let head = group / (of_keys + of_queries);
    let turn = group % (of_keys + of_queries);
    let before = turn * of_keys / (of_keys + of_queries);
    if (turn + 1u) * of_keys / (of_keys + of_queries) > before {
        find_for_keys(lane, place_of(head * of_keys + before, p.keys, p.kv_heads, WIDEST_OF_KEYS));
    } else {
        find_for_queries(lane, place_of(head * of_queries + turn - before, p.queries, p.heads, WIDEST));
    }
}

// Eight rows of threads have eight queries each, and all keys in turn.
fn find_for_queries(lane: u32, at: Place) {
    let kv_head = at.head / (p.heads / p.kv_heads);
    let row = lane / 8u * 8u;
    let part = lane % 8u;
    let query = at.first + row;
    let column = at.column + 8u * part;
    let about = known_of(at.sample, at.head, query, lane / 8u, part);
    let bounds = bounds_of(at.sample, query);
    if lane == 0u { bound = seen(at.sample, min(at.first + ROWS, p.queries) - 1u); }
    let end = workgroupUniformLoad(&bound);
    var sums = Tile();
    var more = Tile();
    for (var key = 0u; key < end; key += ROWS) {
        let found = find(at.sample, at.head, kv_head, query, key + 8u * part, bounds, about);
        workgroupBarrier();
        hand_over(row, part, flipped(found.slopes));
        workgroupBarrier();
        for (var i = 0u; i < 8u; i++) {
            let rows = handed_tile(row, i);
            if column < D { sums = add_matmul(sums, rows, k_tile(at.sample, kv_head, key + 8u * i, column)); }
            if D > 64u && column + 64u < D {
                more = add_matmul(more, rows, k_tile(at.sample, kv_head, key + 8u * i, column + 64u));
            }
        }
    }
    put_tile(QUERIES, at, query, column, sums);
    if D > 64u { put_tile(QUERIES, at, query, column + 64u, more); }
}

// Eight rows of threads have eight keys each, and all queries in turn.
fn find_for_keys(lane: u32, at: Place) {
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
            // Also the barrier after which nobody reads what was handed over before.
            let about = known_of(at.sample, head, query, part, lane / 8u);
            let found = find(at.sample, head, at.head, query, key, bounds_of(at.sample, query), about);
            hand_over(row, part, found.weights);
            workgroupBarrier();
            for (var i = 0u; i < 8u && column < D; i++) {
                v_sums = add_matmul(v_sums, handed_tile(row, i), gradient_tile(at.sample, head, first + 8u * i, column));
            }
            workgroupBarrier();
            hand_over(row, part, found.slopes);
            workgroupBarrier();
            for (var i = 0u; i < 8u && column < D; i++) {
                k_sums = add_matmul(k_sums, handed_tile(row, i), q_tile(at.sample, head, first + 8u * i, column));
            }
        }
    }
    put_tile(KEYS, at, key, column, k_sums);
    put_tile(VALUES, at, key, column, v_sums);
}

fn put_row(what: u32, at: Place, row: u32, column: u32, x: Eight) {
    if column >= D || row >= select(p.keys, p.queries, what == QUERIES) { return; }
    let place = key_at(at.sample, at.head, row, column);
    switch what {
        case QUERIES: { put_dq_eight(query_at(at.sample, at.head, row, column), x, D - column, p.add_q); }
        case KEYS: { put_dk_eight(place, x, D - column, p.add_k); }
        default: { put_dv_eight(place, x, D - column, p.add_v); }
    }
}
