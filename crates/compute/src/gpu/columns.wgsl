// Sums over rows, column by column, for a vector of every so many rows:
//
//   out[vector, column] = sum over its rows of a * b'
//
// with b' = 1 without b, and else (b - mean) * inverse where the row's statistics are given.

var<workgroup> sums: array<vec2<f32>, 256>;

// A group has 64 columns of one vector, a thread two of them; its eight rows of threads share the rows of
// numbers, and the first one adds them up.
kernel sum_columns(a: [X], b: [X], statistics: [f32], sum: mut [Y], rows: u32, width: u32, out_width: u32,
                   out_first: u32, add: u32) {
    let blocks = (p.width + 63u) / 64u;
    let vector = group / blocks;
    let column = (group % blocks) * 64u + 2u * (lane % 32u);
    let both = column + 1u < p.width;
    var total = vec2<f32>(0.0);
    if column < p.width {
        for (var row = vector * p.rows + lane / 32u; row < (vector + 1u) * p.rows; row += 8u) {
            let at = row * p.width + column;
            var x = a_pair(at);
            if has_b() {
                var y = b_pair(at);
                if has_statistics() { y = (y - statistics(2u * row)) * statistics(2u * row + 1u); }
                x *= y;
            }
            total += x;
        }
    }
    sums[lane] = total;
    workgroupBarrier();
    if lane >= 32u || column >= p.width { return; }
    total = vec2<f32>(0.0);
    for (var i = lane; i < 256u; i += 32u) { total += sums[i]; }
    put_sum_pair(vector * p.out_width + p.out_first + column, total, both, p.add);
}

// The mean and 1 / deviation of each row; a mean of zero and 1 / root mean square if not centered.
// PER_ROW threads for each row.
kernel row_statistics(x: [X], statistics: mut [f32], rows: u32, width: u32, epsilon: f32, centered: u32) {
    let row = thread / PER_ROW;
    let place = lane % PER_ROW;
    let end = select(0u, p.width, row < p.rows);
    var sum = 0.0;
    if p.centered != 0u {
        for (var i = place; i < end; i += PER_ROW) { sum += x(row * p.width + i); }
    }
    let mean = row_sum(lane, sum) / f32(p.width);
    var squares = 0.0;
    for (var i = place; i < end; i += PER_ROW) {
        let distance = x(row * p.width + i) - mean;
        squares += distance * distance;
    }
    let inverse = 1.0 / sqrt(row_sum(lane, squares) / f32(p.width) + p.epsilon);
    if place == 0u && row < p.rows {
        set_statistics(2u * row, mean);
        set_statistics(2u * row + 1u, inverse);
    }
}
