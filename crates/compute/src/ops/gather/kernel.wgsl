// Tokens by index, a thread for every two elements of what is written.

kernel gather(x: [X], ids: [u32], y: mut [Y], n_numbers: u32, width: u32, n: u32, n_tokens: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n_numbers { return; }
    put_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n_numbers, p.add);
}

fn one(at: u32) -> f32 {
    let row = min(at, p.n_numbers - 1u) / p.width;
    return x((row / p.n * p.n_tokens + ids(row)) * p.width + at % p.width);
}

// A place finds what lands on it in the sorted order of the indices, and sums it up in that order.
kernel scatter(x: [X], ids: [u32], order: [u32], y: mut [Y], n_numbers: u32, width: u32, n: u32,
               n_tokens: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n_numbers { return; }
    put_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n_numbers, p.add);
}

fn one(at: u32) -> f32 {
    let row = at / p.width;
    let first = row / p.n_tokens * p.n;
    let place = row % p.n_tokens;
    var low = 0u;
    var high = p.n;
    while low < high {
        let middle = (low + high) / 2u;
        if ids(first + order(first + middle)) < place { low = middle + 1u; } else { high = middle; }
    }
    var sum = 0.0;
    while low < p.n {
        let position = first + order(first + low);
        if ids(position) != place { break; }
        sum += x(position * p.width + at % p.width);
        low++;
    }
    return sum;
}
