// Tokens copied or added, a thread for every two numbers of the span.

kernel copy_tokens(source: [X], goal: mut [Y], n: u32, width: u32, count: u32, n_from: u32, n_to: u32,
                   first_from: u32, first_to: u32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    if (p.width & 1u) == 0u {
        put_goal_pair(place_to(at), source_pair(place_from(at)), true, p.add);
        return;
    }
    // Two numbers of an odd row may not lie beside each other.
    put_goal(place_to(at), source(place_from(at)), p.add);
    if at + 1u < p.n { put_goal(place_to(at + 1u), source(place_from(at + 1u)), p.add); }
}

fn place_from(at: u32) -> u32 {
    let token = at / p.width;
    return (token / p.count * p.n_from + p.first_from + token % p.count) * p.width + at % p.width;
}

fn place_to(at: u32) -> u32 {
    let token = at / p.width;
    return (token / p.count * p.n_to + p.first_to + token % p.count) * p.width + at % p.width;
}
