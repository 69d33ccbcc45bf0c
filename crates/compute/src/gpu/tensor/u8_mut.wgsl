// Four that lie in one word; `i` and the tensor's start are multiples of four, and what is beyond its end
// is nobody's.
fn set_NAME_four(i: u32, codes: vec4<u32>) {
    let word = codes.x | (codes.y << 8u) | (codes.z << 16u) | (codes.w << 24u);
    NAME_words[(p.NAME_at + i) >> 2u] = word;
}
