// Sums of whole tensors, a thread for every eight elements.

kernel add(x: [X by WIDE], y: [X by WIDE], total: mut [X by WIDE], n: u32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    let n = p.n - at;
    set_total_eight(at, plus(x_eight(at, n), y_eight(at, n)), n);
}

kernel scale(x: [X by WIDE], y: mut [X by WIDE], n: u32, factor: f32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    set_y_eight(at, times(p.factor, x_eight(at, p.n - at)), p.n - at);
}

// The gradient may be rounded and what it is added to not.
kernel accumulate(gradient: [X by WIDE], total: mut [Y by WIDE], n: u32, add: u32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    put_total_eight(at, gradient_eight(at, p.n - at), p.n - at, p.add);
}

// A thread for every eight elements of a row; a sample's gate lies within a row of all its vectors.
kernel gated_add(x: [X by WIDE], gates: [X by WIDE], y: [X by WIDE], total: mut [X by WIDE], rows: u32,
                 tokens: u32, width: u32, gates_width: u32, first: u32) {
    let per_row = (p.width + 7u) / 8u;
    let row = thread / per_row;
    let i = 8u * (thread % per_row);
    if row >= p.rows { return; }
    let at = row * p.width + i;
    let n = p.width - i;
    let gate = gates_eight(row / p.tokens * p.gates_width + p.first + i, n);
    set_total_eight(at, plus(x_eight(at, n), multiplied(gate, y_eight(at, n))), n);
}

kernel gated(gates: [X by WIDE], gradient: [X by WIDE], result: mut [X by WIDE], rows: u32, tokens: u32,
             width: u32, gates_width: u32, first: u32, add: u32) {
    let per_row = (p.width + 7u) / 8u;
    let row = thread / per_row;
    let i = 8u * (thread % per_row);
    if row >= p.rows { return; }
    let at = row * p.width + i;
    let n = p.width - i;
    let gate = gates_eight(row / p.tokens * p.gates_width + p.first + i, n);
    put_result_eight(at, multiplied(gate, gradient_eight(at, n)), n, p.add);
}
