// Khatri-Rao products, a thread for every number.

// Where a number of a matrix is that has so many of its own.
fn place(own: u32, i: u32, c: u32) -> u32 {
    return select(i * p.n_shared + c, c * own + i, p.by_rows != 0u);
}

kernel khatri_rao(a: [f32], b: [f32], y: mut [f32], n: u32, n_shared: u32, r: u32, s: u32, by_rows: u32) {
    if thread >= p.n { return; }
    let pairs = p.r * p.s;
    let pair = select(thread / p.n_shared, thread % pairs, p.by_rows != 0u);
    let c = select(thread % p.n_shared, thread / pairs, p.by_rows != 0u);
    set_y(thread, a(place(p.r, pair / p.s, c)) * b(place(p.s, pair % p.s, c)));
}

// The gradient of one factor: the sum over all numbers of the other one.
kernel khatri_rao_backward(gradient: [f32], other: [f32], result: mut [f32], n: u32, n_shared: u32, own: u32,
                           others: u32, step: u32, inner: u32, by_rows: u32, add: u32) {
    if thread >= p.n { return; }
    let i = select(thread / p.n_shared, thread % p.own, p.by_rows != 0u);
    let c = select(thread % p.n_shared, thread / p.own, p.by_rows != 0u);
    var sum = 0.0;
    for (var j = 0u; j < p.others; j++) {
        let pair = i * p.step + j * p.inner;
        sum += gradient(place(p.own * p.others, pair, c)) * other(place(p.others, j, c));
    }
    put_result(thread, sum, p.add);
}
