// Activations, a thread for every eight elements.

kernel activate(x: [X by WIDE], y: mut [X by WIDE], n: u32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    let numbers = x_eight(at, p.n - at);
    set_y_eight(at, Eight(activations(numbers.low), activations(numbers.high)), p.n - at);
}

fn activations(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(activation(KIND, x.x), activation(KIND, x.y), activation(KIND, x.z), activation(KIND, x.w));
}

// In place: the gradient of the result becomes that of x.
kernel activate_backward(x: [X by WIDE], gradient: mut [X by WIDE], n: u32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    let n = p.n - at;
    let numbers = x_eight(at, n);
    let slope = Eight(slopes(numbers.low), slopes(numbers.high));
    set_gradient_eight(at, multiplied(gradient_eight(at, n), slope), n);
}

fn slopes(x: vec4<f32>) -> vec4<f32> {
    return vec4<f32>(activation_slope(KIND, x.x), activation_slope(KIND, x.y), activation_slope(KIND, x.z),
                     activation_slope(KIND, x.w));
}
