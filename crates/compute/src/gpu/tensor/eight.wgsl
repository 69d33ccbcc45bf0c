// Eights that may start anywhere, of which the first n are there; the others are zeros. By a loop, so that texts
// stay short: this is for sizes that are rare.
fn NAME_eight(i: u32, n: u32) -> EIGHT {
    var gathered = EIGHT();
    for (var turn = 0u; turn < min(n, 8u); turn++) {
        let number = vec4<NUMBER>(NAME(i + turn));
        gathered.low = select(gathered.low, number, FIRST_FOUR == vec4<u32>(turn));
        gathered.high = select(gathered.high, number, FIRST_FOUR + 4u == vec4<u32>(turn));
    }
    return gathered;
}
