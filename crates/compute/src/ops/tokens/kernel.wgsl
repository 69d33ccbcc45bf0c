// Tokens copied or added, a thread for every eight elements of a token of the span.

kernel copy_tokens(source: [X by WIDE], goal: mut [Y by WIDE], rows: u32, width: u32, count: u32, n_from: u32,
                   n_to: u32, first_from: u32, first_to: u32, add: u32) {
    let per_row = (p.width + 7u) / 8u;
    let token = thread / per_row;
    let i = 8u * (thread % per_row);
    if token >= p.rows { return; }
    let sample = token / p.count;
    let place = token % p.count;
    let from_at = (sample * p.n_from + p.first_from + place) * p.width + i;
    let to_at = (sample * p.n_to + p.first_to + place) * p.width + i;
    put_goal_eight(to_at, source_eight(from_at, p.width - i), p.width - i, p.add);
}
