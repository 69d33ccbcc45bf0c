// Groups of a row mixed by a matrix, a thread for every two numbers of the result.

kernel mix_groups(x: [X], w: [f32], y: mut [Y], n: u32, n_from: u32, n_to: u32, width: u32, step: u32,
                  row_step: u32, scale: f32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    var both = vec2<f32>(mixed(at), 0.0);
    if at + 1u < p.n { both.y = mixed(at + 1u); }
    put_y_pair(at, both, at + 1u < p.n, p.add);
}

fn mixed(at: u32) -> f32 {
    let place = at % p.width;
    let group = at / p.width;
    let i = group % p.n_to;
    let first = group / p.n_to * p.n_from;
    var sum = 0.0;
    for (var k = 0u; k < p.n_from; k++) {
        sum += w(i * p.row_step + k * p.step) * x((first + k) * p.width + place);
    }
    return p.scale * sum;
}

// The weight's gradient, a workgroup for each number of it.
kernel mix_groups_weight(x: [X], gradient: [X], result: mut [f32], rows: u32, n_from: u32, n_to: u32, width: u32,
                         scale: f32, add: u32) {
    let i = group / p.n_from;
    let k = group % p.n_from;
    var sum = 0.0;
    for (var at = lane; at < p.rows * p.width; at += THREADS) {
        let row = at / p.width;
        let place = at % p.width;
        sum += gradient((row * p.n_to + i) * p.width + place) * x((row * p.n_from + k) * p.width + place);
    }
    sum = group_sum(lane, sum);
    if lane == 0u { put_result(group, p.scale * sum, p.add); }
}
