// Quantise and dequantise.

// The code of the nearest e4m3 number, ties to an even code; what is larger than all becomes the largest.
fn to_e4m3(x: f32) -> u32 {
    if is_nan(x) { return 0x7fu; }
    let sign = select(0u, 0x80u, (bitcast<u32>(x) >> 31u) == 1u);
    let size = abs(x);
    var low = 0u;
    var high = 0x7eu;
    while high - low > 1u {
        let middle = (low + high) / 2u;
        if from_e4m3(middle) <= size { low = middle; } else { high = middle; }
    }
    let below = size - from_e4m3(low);
    let above = from_e4m3(high) - size;
    return sign | select(low, high, below > above || (below == above && (low & 1u) == 1u));
}

// The scale of a row: its largest size, divided by the largest number there is. A group for each.
kernel row_scales(matrix: [X], scales: mut [f32], width: u32, largest: f32) {
    var most = 0.0;
    for (var i = lane; i < p.width; i += THREADS) {
        let size = abs(matrix(group * p.width + i));
        if size > most { most = size; }
    }
    most = group_max(lane, most);
    if lane == 0u { set_scales(group, most / p.largest); }
}

// A thread for every four elements.
kernel row_codes(matrix: [X], scales: [f32], codes: mut [u8], n: u32, width: u32, is_fp8: u32) {
    let at = 4u * thread;
    if at >= p.n { return; }
    set_codes_four(at, vec4<u32>(code(at), code(at + 1u), code(at + 2u), code(at + 3u)));
}

fn code(at: u32) -> u32 {
    if at >= p.n { return 0u; }
    let scale = scales(at / p.width);
    // A row of zeros has no scale, and needs none.
    var x = 0.0;
    if scale != 0.0 { x = matrix(at) / scale; }
    if p.is_fp8 != 0u { return to_e4m3(x); }
    return bitcast<u32>(i32(round(x))) & 0xffu;
}

// The largest size of every 64 numbers, a thread for each.
kernel block_scales(matrix: [X], scales: mut [f32], blocks: u32) {
    if thread >= p.blocks { return; }
    var most = 0.0;
    for (var i = 0u; i < 64u; i++) {
        let size = abs(matrix(64u * thread + i));
        if size > most { most = size; }
    }
    set_scales(thread, most);
}

// A thread for every eight elements, which are four bytes of codes.
kernel block_codes(matrix: [X], scales: [f32], tables: [f32], codes: mut [u8], n: u32) {
    let at = 8u * thread;
    if at >= p.n { return; }
    let scale = scales(at / 64u);
    var factor = 0.0;
    if scale != 0.0 { factor = 1.0 / scale; }
    set_codes_four(at / 2u, vec4<u32>(two(at, factor), two(at + 2u, factor), two(at + 4u, factor),
                                      two(at + 6u, factor)));
}

fn two(at: u32, factor: f32) -> u32 {
    return (nearest(matrix(at) * factor) << 4u) | nearest(matrix(at + 1u) * factor);
}

fn nearest(x: f32) -> u32 {
    var code = 0u;
    while code < 15u && x > 0.5 * (tables(code) + tables(code + 1u)) { code++; }
    return code;
}

// Dequantise, a thread for each.
kernel rows(codes: [u8], scales: [f32], numbers: mut [f32], n: u32, width: u32, is_fp8: u32) {
    if thread >= p.n { return; }
    let scale = scales(thread / p.width);
    let code = codes(thread);
    if p.is_fp8 != 0u { set_numbers(thread, scale * from_e4m3(code)); }
    else { set_numbers(thread, scale * from_int8(code)); }
}

// The same of nf4: `tables` has the sixteen numbers and then the 256 of the scales' codebook.
kernel blocks(codes: [u8], block_codes: [u8], groups: [f32], mean: [f32], tables: [f32],
              numbers: mut [f32], n: u32) {
    if thread >= p.n { return; }
    let block = thread / 64u;
    let scale = tables(16u + block_codes(block)) * groups(block / 256u) + mean(0u);
    let code = (codes(thread / 2u) >> select(4u, 0u, (thread & 1u) == 1u)) & 15u;
    set_numbers(thread, scale * tables(code));
}
