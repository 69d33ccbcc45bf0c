// Gated linear units, a thread for every two numbers.

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

kernel glu_up_backward(gate: [X], gradient: [X], result: mut [Y], n: u32, kind: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let x = activations(p.kind, gate_pair(at)) * gradient_pair(at);
    put_result_pair(at, x, at + 1u < p.n, p.add);
}

// In place: the gradient of the result becomes that of the gate.
kernel glu_gate_backward(gate: [X], up: [X], gradient: mut [X], n: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let slope = slopes(p.kind, gate_pair(at)) * up_pair(at);
    set_gradient_pair(at, gradient_pair(at) * slope, at + 1u < p.n);
}
