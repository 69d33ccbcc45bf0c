// Root-mean-square norm over channels: a thread for each pixel finds its factor, then a thread for every two numbers
// applies them.

kernel channel_factors(x: [X], factors: mut [f32], pixels: u32, channels: u32, plane: u32, epsilon: f32) {
    if thread >= p.pixels { return; }
    let first = thread / p.plane * p.channels * p.plane + thread % p.plane;
    var sum = 0.0;
    for (var channel = 0u; channel < p.channels; channel++) {
        let a = x(first + channel * p.plane);
        sum += a * a;
    }
    set_factors(thread, sqrt(f32(p.channels)) / larger(sqrt(sum), p.epsilon));
}

kernel channel_rms_norm(x: [X], factors: [f32], weight: [f32], y: mut [X], n: u32, channels: u32, plane: u32,
                        kind: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let of_plane = at / p.plane;
    let factor = factors(of_plane / p.channels * p.plane + at % p.plane);
    return activation(p.kind, x(at) * factor * weight(of_plane % p.channels));
}
