// Gated linear units, a thread for every two elements.

fn activations(kind: u32, x: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(activation(kind, x.x), activation(kind, x.y));
}

fn slopes(kind: u32, x: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(activation_slope(kind, x.x), activation_slope(kind, x.y));
}

kernel glu(gate: [X], up: [X], y: mut [X], n: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, activations(p.kind, gate_pair(at)) * up_pair(at), at + 1u < p.n);
}

// What is not wanted is not given. In place: the gradient of the result becomes that of the gate.
kernel glu_backward(gate: [X], up: [X], gradient: mut [X], result: mut [Y], n: u32, kind: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let both = at + 1u < p.n;
    let x = gate_pair(at);
    let g = gradient_pair(at);
    if has_result() { put_result_pair(at, activations(p.kind, x) * g, both, p.add); }
    if has_up() { set_gradient_pair(at, g * (slopes(p.kind, x) * up_pair(at)), both); }
}
