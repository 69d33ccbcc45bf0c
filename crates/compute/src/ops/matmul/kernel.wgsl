// Products of matrices. A group of 16 by 16 threads has 64 rows and 64 columns of the result, a thread
// four by four of them; the factors pass through shared memory 16 numbers deep at a time, as f32.
//
// What the text is compiled for: whether factors are transposed (LEFT_T, RIGHT_T), and whether there is a
// second product, of f32, that adds to the first (SECOND: 0 for none, 1, or 2 if its right is transposed).
// Quantised numbers are made f32 on their way, so that a dequantised copy of a matrix never exists.

const SIDE: u32 = 64u;
const DEPTH: u32 = 16u;
// Numbers that are summed up on their own before they are added to the others: one long sum would lose
// the last of its digits.
const BLOCK: u32 = 64u;

// Four rows of the left and four columns of the right factor at a depth: [DEPTH][16].
var<workgroup> left_tile: array<vec4<f32>, 256>;
var<workgroup> right_tile: array<vec4<f32>, 256>;

// Of a thread, when it loads: how deep, and which four rows or columns. Threads beside each other read
// numbers that lie beside each other.
fn load_place(lane: u32, is_along: bool) -> vec2<u32> {
    return select(vec2<u32>(lane % DEPTH, lane / DEPTH), vec2<u32>(lane / 16u, lane % 16u), is_along);
}

fn left_at(row: u32, depth: u32) -> f32 {
    if row >= p.rows || depth >= p.inner { return 0.0; }
    if LEFT_T == 1u { return p.scale * left(depth * p.rows + row); }
    return p.scale * left(row * p.inner + depth);
}

fn right_at(depth: u32, column: u32) -> f32 {
    if column >= p.columns || depth >= p.inner { return 0.0; }
    if RIGHT_T == 1u { return right_number(column, depth, p.inner); }
    return right_number(depth, column, p.columns);
}

fn second_left_at(row: u32, depth: u32) -> f32 {
    if row >= p.rows || depth >= p.second_inner { return 0.0; }
    return p.second_scale * second_left(row * p.second_inner + depth);
}

fn second_right_at(depth: u32, column: u32) -> f32 {
    if column >= p.columns || depth >= p.second_inner { return 0.0; }
    if SECOND == 2u { return second_right(column * p.second_inner + depth); }
    return second_right(depth * p.columns + column);
}

// What the tiles give to a thread's sixteen sums.
fn add_tiles(lane: u32, sums: ptr<function, array<vec4<f32>, 4>>) {
    workgroupBarrier();
    for (var depth = 0u; depth < DEPTH; depth++) {
        let l = left_tile[depth * 16u + lane / 16u];
        let r = right_tile[depth * 16u + lane % 16u];
        (*sums)[0] += l.x * r;
        (*sums)[1] += l.y * r;
        (*sums)[2] += l.z * r;
        (*sums)[3] += l.w * r;
    }
    workgroupBarrier();
}

fn multiply(lane: u32, group: u32) {
    let across = (p.columns + SIDE - 1u) / SIDE;
    let first_row = group / across * SIDE;
    let first_column = group % across * SIDE;
    var sums = array<vec4<f32>, 4>();
    var totals = array<vec4<f32>, 4>();
    let l = load_place(lane, LEFT_T == 1u);
    let r = load_place(lane, RIGHT_T == 0u);
    for (var depth = 0u; depth < p.inner; depth += DEPTH) {
        let row = first_row + 4u * l.y;
        let column = first_column + 4u * r.y;
        left_tile[l.x * 16u + l.y] =
            vec4<f32>(left_at(row, depth + l.x), left_at(row + 1u, depth + l.x),
                      left_at(row + 2u, depth + l.x), left_at(row + 3u, depth + l.x));
        right_tile[r.x * 16u + r.y] =
            vec4<f32>(right_at(depth + r.x, column), right_at(depth + r.x, column + 1u),
                      right_at(depth + r.x, column + 2u), right_at(depth + r.x, column + 3u));
        add_tiles(lane, &sums);
        if (depth + DEPTH) % BLOCK == 0u {
            for (var i = 0u; i < 4u; i++) {
                totals[i] += sums[i];
                sums[i] = vec4<f32>(0.0);
            }
        }
    }
    if SECOND != 0u { add_second(lane, first_row, first_column, &sums); }
    for (var i = 0u; i < 4u; i++) { totals[i] += sums[i]; }
    finish(first_row + 4u * (lane / 16u), first_column + 4u * (lane % 16u), &totals);
}

fn add_second(lane: u32, first_row: u32, first_column: u32, sums: ptr<function, array<vec4<f32>, 4>>) {
    let l = load_place(lane, false);
    let r = load_place(lane, SECOND == 1u);
    for (var depth = 0u; depth < p.second_inner; depth += DEPTH) {
        let row = first_row + 4u * l.y;
        let column = first_column + 4u * r.y;
        left_tile[l.x * 16u + l.y] =
            vec4<f32>(second_left_at(row, depth + l.x), second_left_at(row + 1u, depth + l.x),
                      second_left_at(row + 2u, depth + l.x), second_left_at(row + 3u, depth + l.x));
        right_tile[r.x * 16u + r.y] =
            vec4<f32>(second_right_at(depth + r.x, column), second_right_at(depth + r.x, column + 1u),
                      second_right_at(depth + r.x, column + 2u), second_right_at(depth + r.x, column + 3u));
        add_tiles(lane, sums);
    }
}

// Bias, activation and rounding of a thread's sums.
fn finish(first_row: u32, column: u32, sums: ptr<function, array<vec4<f32>, 4>>) {
    for (var i = 0u; i < 4u; i++) {
        let row = first_row + i;
        if row >= p.rows { return; }
        finish_pair(row, column, (*sums)[i].xy);
        finish_pair(row, column + 2u, (*sums)[i].zw);
    }
}

fn finish_pair(row: u32, column: u32, x: vec2<f32>) {
    if column >= p.columns { return; }
    let both = column + 1u < p.columns;
    let at = row * p.columns + column;
    var value = x;
    if has_bias() { value += bias_pair(column); }
    if has_before() { set_before_pair(at, value, both); }
    if p.kind != 0u { value = vec2<f32>(activation(p.kind, value.x), activation(p.kind, value.y)); }
    put_result_pair(at, value, both, p.add);
}

kernel product(left: [X], right: [Y], second_left: [f32], second_right: [f32], bias: [f32],
               before: mut [Z], result: mut [Z], rows: u32, columns: u32, inner: u32, scale: f32,
               second_inner: u32, second_scale: f32, kind: u32, add: u32) {
    multiply(lane, group);
}

fn right_number(row: u32, column: u32, width: u32) -> f32 { return right(row * width + column); }

// The right factor in int8 or, if FP8 is 1, in fp8 (e4m3), with a scale for each of its rows.
kernel product_by_rows(left: [X], codes: [u8], scales: [f32], second_left: [f32], second_right: [f32],
                       bias: [f32], before: mut [Z], result: mut [Z], rows: u32, columns: u32,
                       inner: u32, scale: f32, second_inner: u32, second_scale: f32, kind: u32,
                       add: u32) {
    multiply(lane, group);
}

fn right_number(row: u32, column: u32, width: u32) -> f32 {
    let code = codes(row * width + column);
    if FP8 == 1u { return scales(row) * from_e4m3(code); }
    return scales(row) * from_int8(code);
}

// The right factor in nf4: `tables` has the sixteen numbers and then the 256 of the scales' codebook.
kernel product_by_blocks(left: [X], codes: [u8], block_codes: [u8], groups: [f32], mean: [f32],
                         tables: [f32], second_left: [f32], second_right: [f32], bias: [f32],
                         before: mut [Z], result: mut [Z], rows: u32, columns: u32, inner: u32,
                         scale: f32, second_inner: u32, second_scale: f32, kind: u32, add: u32) {
    multiply(lane, group);
}

fn right_number(row: u32, column: u32, width: u32) -> f32 {
    let at = row * width + column;
    let block = at / 64u;
    let block_scale = tables(16u + block_codes(block)) * groups(block / 256u) + mean(0u);
    let code = (codes(at / 2u) >> select(4u, 0u, (at & 1u) == 1u)) & 15u;
    return block_scale * tables(code);
}
