
fn put_NAME_eight(i: u32, numbers: Eight, n: u32, add: u32) {
    var sums = numbers;
    if add != 0u { sums = plus(numbers, NAME_eight(i, n)); }
    set_NAME_eight(i, sums, n);
}
