
fn set_NAME_eight(i: u32, numbers: Eight, n: u32) {
    for (var turn = 0u; turn < min(n, 8u); turn += 2u) {
        let four = select(numbers.low, numbers.high, turn >= 4u);
        set_NAME_pair(i + turn, select(four.xy, four.zw, (turn & 2u) != 0u), turn + 1u < n);
    }
}
