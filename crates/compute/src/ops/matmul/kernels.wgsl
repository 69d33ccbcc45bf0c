
// The kernels, by the dtype of the right operand.

// The right operand may be some columns of a wider tensor, from `first` on.
kernel matmul(left: [X by LEFT_WIDE], right: [Y by RIGHT_WIDE], stride: u32, first: u32,
              second_left: [f32 by SECOND_WIDE], second_right: [f32 by SECOND_WIDE], bias: [f32 by WIDE],
              before: mut [Z by WIDE], result: mut [Z by WIDE], rows: u32, columns: u32, inner: u32,
              scale: f32, second_inner: u32, second_scale: f32, beside: u32, add: u32) {
    multiply(lane, group);
}

fn right_numbers(row: u32, column: u32, width: u32) -> Eight {
    return right_eight(row * p.stride + p.first + column, width - column);
}

// The right operand in int8 or, if FP8 is 1, in fp8 (e4m3), with a scale for each of its rows.
kernel matmul_by_rows(left: [X by LEFT_WIDE], codes: [u8 by RIGHT_WIDE], scales: [f32],
                      second_left: [f32 by SECOND_WIDE], second_right: [f32 by SECOND_WIDE],
                      bias: [f32 by WIDE], before: mut [Z by WIDE], result: mut [Z by WIDE], rows: u32,
                      columns: u32, inner: u32, scale: f32, second_inner: u32, second_scale: f32,
                      beside: u32, add: u32) {
    multiply(lane, group);
}

fn right_numbers(row: u32, column: u32, width: u32) -> Eight {
    let codes = codes_eight(row * width + column, width - column);
    return times(scales(row), Eight(numbers(codes.low), numbers(codes.high)));
}

fn numbers(codes: vec4<u32>) -> vec4<f32> {
    if FP8 == 0u { return vec4<f32>(bitcast<vec4<i32>>(codes << vec4<u32>(24u)) >> vec4<u32>(24u)); }
    return vec4<f32>(from_e4m3(codes.x), from_e4m3(codes.y), from_e4m3(codes.z), from_e4m3(codes.w));
}

// The right operand in nf4: `tables` has the sixteen numbers and then the 256 of the scales' codebook. Eights
// that start at multiples of eight lie in one block and are one word of codes.
kernel matmul_by_blocks(left: [X by LEFT_WIDE], codes: [u8], block_codes: [u8], groups: [f32], mean: [f32],
                        tables: [f32], second_left: [f32 by SECOND_WIDE],
                        second_right: [f32 by SECOND_WIDE], bias: [f32 by WIDE], before: mut [Z by WIDE],
                        result: mut [Z by WIDE], rows: u32, columns: u32, inner: u32, scale: f32,
                        second_inner: u32, second_scale: f32, beside: u32, add: u32) {
    multiply(lane, group);
}

fn right_numbers(row: u32, column: u32, width: u32) -> Eight {
    let at = row * width + column;
    if RIGHT_WIDE == 0u { return one_by_one(at, width - column); }
    let codes = codes_four(at / 2u);
    let high = codes >> vec4<u32>(4u);
    let low = codes & vec4<u32>(15u);
    return times(block_scale(at / 64u),
                 Eight(vec4<f32>(tables(high.x), tables(low.x), tables(high.y), tables(low.y)),
                       vec4<f32>(tables(high.z), tables(low.z), tables(high.w), tables(low.w))));
}

fn block_scale(block: u32) -> f32 {
    return tables(16u + block_codes(block)) * groups(block / 256u) + mean(0u);
}

fn one_by_one(at: u32, n: u32) -> Eight {
    return Eight(vec4<f32>(one(at, n > 0u), one(at + 1u, n > 1u), one(at + 2u, n > 2u), one(at + 3u, n > 3u)),
                 vec4<f32>(one(at + 4u, n > 4u), one(at + 5u, n > 5u), one(at + 6u, n > 6u),
                           one(at + 7u, n > 7u)));
}

fn one(at: u32, is_there: bool) -> f32 {
    if !is_there { return 0.0; }
    let code = (codes(at / 2u) >> select(4u, 0u, (at & 1u) == 1u)) & 15u;
    return block_scale(at / 64u) * tables(code);
}
