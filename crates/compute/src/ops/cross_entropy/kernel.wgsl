// What is done to a piece of the logits. A fold is three numbers per row: the largest logit so far, the
// sum of exponentials relative to it, and the logit of the target.

// A workgroup for each row.
kernel fold(logits: [f32], targets: [u32], folds: mut [f32], columns: u32, first: u32) {
    let start = group * p.columns;
    var most = LOWEST;
    for (var i = lane; i < p.columns; i += THREADS) { most = larger(most, logits(start + i)); }
    most = group_max(lane, most);
    var before = LOWEST;
    var sum_before = 0.0;
    var kept = LOWEST;
    if p.first != 0u {
        before = folds(3u * group);
        sum_before = folds(3u * group + 1u);
        kept = folds(3u * group + 2u);
    }
    let highest = larger(most, before);
    var sum = 0.0;
    for (var i = lane; i < p.columns; i += THREADS) { sum += exponential(logits(start + i) - highest); }
    sum = group_sum(lane, sum);
    if lane != 0u { return; }
    let word = targets(group);
    if word >= p.first && word - p.first < p.columns { kept = logits(start + word - p.first); }
    set_folds(3u * group, highest);
    set_folds(3u * group + 1u, sum_before * exponential(before - highest) + sum);
    set_folds(3u * group + 2u, kept);
}

// The mean over the rows that count. One workgroup.
kernel finish(folds: [f32], targets: [u32], mean: mut [f32], rows: u32, counted: f32) {
    var total = 0.0;
    for (var row = lane; row < p.rows; row += THREADS) {
        let loss = folds(3u * row) - folds(3u * row + 2u) + logarithm(folds(3u * row + 1u));
        if targets(row) != NONE { total += loss; }
    }
    total = group_sum(lane, total);
    if lane == 0u { set_mean(0u, total / p.counted); }
}

// Logits become the gradients of their rows' losses: softmax - 1 at the target. A thread for each.
kernel logit_gradients(logits: mut [f32], targets: [u32], folds: [f32], n: u32, columns: u32, first: u32) {
    if thread >= p.n { return; }
    let row = thread / p.columns;
    let word = targets(row);
    var slope = exponential(logits(thread) - folds(3u * row)) / folds(3u * row + 1u);
    if thread % p.columns + p.first == word { slope -= 1.0; }
    set_logits(thread, select(slope, 0.0, word == NONE));
}

// Multiplies each row by its weight. A thread for every two elements.
kernel scale_rows(weights: [f32], sums: mut [X], n: u32, width: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let both = at + 1u < p.n;
    let second = select(at, at + 1u, both);
    set_sums_pair(at, vec2<f32>(weights(at / p.width) * sums(at), weights(second / p.width) * sums(second)), both);
}

// A thread for every two elements.
kernel add_scaled(sums: [f32], gradient: [f32], total: mut [X], n: u32, share: f32, add: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    put_total_pair(at, p.share * gradient(0u) * sums_pair(at), at + 1u < p.n, p.add);
}
