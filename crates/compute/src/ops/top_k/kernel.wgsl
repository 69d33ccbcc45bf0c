// The largest keys, a thread for each key: it counts those before its own.

kernel top_k(keys: [X], ids: mut [u32], all: u32, n: u32, k: u32) {
    if thread >= p.all { return; }
    let row = thread / p.n;
    let own = thread % p.n;
    let key = order(thread);
    var rank = 0u;
    for (var i = 0u; i < p.n; i++) {
        let other = order(row * p.n + i);
        rank += select(0u, 1u, other > key || (other == key && i < own));
    }
    if rank < p.k { add_ids(row * p.k + rank, own); }
}

// The order of integers is that of the numbers, with NaN at the ends.
fn order(at: u32) -> i32 {
    let bits = bitcast<i32>(keys(at));
    return select(bits, bits ^ 0x7fffffff, bits < 0);
}
