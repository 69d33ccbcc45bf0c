// Norms of rows, a workgroup for each.

kernel row_norms(weight: [X], norms: mut [f32], width: u32) {
    var squares = 0.0;
    for (var i = lane; i < p.width; i += THREADS) {
        let x = weight(group * p.width + i);
        squares += x * x;
    }
    squares = group_sum(lane, squares);
    if lane == 0u { set_norms(group, sqrt(squares)); }
}

// sqrt(norm^2 + scale * b * cross) for each row b of `up`, a thread for each.
kernel adapted_norms(norms: [f32], up: [f32], crossed: [f32], adapted: mut [f32], rows: u32, rank: u32,
                     scale: f32) {
    if thread >= p.rows { return; }
    var sum = 0.0;
    for (var i = 0u; i < p.rank; i++) { sum += up(thread * p.rank + i) * crossed(thread * p.rank + i); }
    let before = norms(thread) * norms(thread);
    let square = before + p.scale * sum;
    // An adapter that cancels its row leaves nothing but rounding, perhaps below zero; and a row of
    // zeros must not turn its magnitude, zero too, into NaN.
    let least = 1.1920929e-7 * before + 1.1754944e-38;
    var norm = sqrt(max(square, least));
    // An adapter that adds nothing changes nothing, however a GPU rounds its roots.
    if sum == 0.0 && before > 1.1754944e-38 { norm = norms(thread); }
    // The larger of two may be either if one is NaN.
    if is_nan(square) { norm = not_a_number(); }
    set_adapted(thread, norm);
}

// A thread for each element.
kernel divide(x: [f32], by: [f32], result: mut [f32], n: u32, add: u32) {
    if thread >= p.n { return; }
    // A quotient may be off by a few units, but equal numbers have one that all know.
    let is_one = x(thread) == by(thread) && is_finite(x(thread));
    put_result(thread, select(x(thread) / by(thread), 1.0, is_one), p.add);
}
