// Activations, a thread for every two numbers.

fn activations(kind: u32, x: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(activation(kind, x.x), activation(kind, x.y));
}

fn slopes(kind: u32, x: vec2<f32>) -> vec2<f32> {
    return vec2<f32>(activation_slope(kind, x.x), activation_slope(kind, x.y));
}

kernel activate(x: [X], y: mut [X], n: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, activations(p.kind, x_pair(at)), at + 1u < p.n);
}

// In place: the gradient of the result becomes that of x.
kernel activate_backward(x: [X], gradient: mut [X], n: u32, kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_gradient_pair(at, gradient_pair(at) * slopes(p.kind, x_pair(at)), at + 1u < p.n);
}
