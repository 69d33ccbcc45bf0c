// Sums over rows, column by column, for a vector of every so many rows:
//
//   out[vector, column] = sum over its rows of a * b
//
// with b = 1 where it is not given.

var<workgroup> sums: array<vec2<f32>, 256>;

// A workgroup has 64 columns of one vector, a thread two of them; its eight rows of threads share the rows of
// numbers, and the first one adds them up.
kernel sum_columns(a: [X], b: [X], sum: mut [Y], rows: u32, width: u32, out_width: u32, out_first: u32,
                   add: u32) {
    let blocks = (p.width + 63u) / 64u;
    let vector = group / blocks;
    let column = (group % blocks) * 64u + 2u * (lane % 32u);
    let both = column + 1u < p.width;
    var total = vec2<f32>(0.0);
    if column < p.width {
        for (var row = vector * p.rows + lane / 32u; row < (vector + 1u) * p.rows; row += 8u) {
            let at = row * p.width + column;
            var x = a_pair(at);
            if has_b() { x *= b_pair(at); }
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
