// Sums of whole tensors, a thread for every two numbers.

kernel add(x: [X], y: [X], total: mut [X], n: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_total_pair(at, x_pair(at) + y_pair(at), at + 1u < p.n);
}

kernel scale(x: [X], y: mut [X], n: u32, factor: f32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, p.factor * x_pair(at), at + 1u < p.n);
}

// The gradient may be rounded and what it is added to not.
kernel accumulate(gradient: [X], total: mut [Y], n: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    put_total_pair(at, gradient_pair(at), at + 1u < p.n, p.add);
}

kernel gated_add(x: [X], gates: [X], y: [X], total: mut [X], n: u32, tokens: u32, width: u32,
                 gates_width: u32, first: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let gate = vec2<f32>(gate_of(at), gate_of(at + 1u));
    set_total_pair(at, x_pair(at) + gate * y_pair(at), at + 1u < p.n);
}

// The gate of the row that a number belongs to; a sample's gate lies within a row of all its vectors.
fn gate_of(at: u32) -> f32 {
    return gates(at / p.width / p.tokens * p.gates_width + p.first + at % p.width);
}

kernel gated(gates: [X], gradient: [X], result: mut [X], n: u32, tokens: u32, width: u32,
             gates_width: u32, first: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let gate = vec2<f32>(gate_of(at), gate_of(at + 1u));
    put_result_pair(at, gate * gradient_pair(at), at + 1u < p.n, p.add);
}

fn gate_of(at: u32) -> f32 {
    return gates(at / p.width / p.tokens * p.gates_width + p.first + at % p.width);
}
