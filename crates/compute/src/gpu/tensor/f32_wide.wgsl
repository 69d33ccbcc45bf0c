// Four numbers to 16 bytes, which pass at once.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<vec4<f32>>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn NAME_eight(i: u32, n: u32) -> Eight {
    let at = (p.NAME_at + i) >> 2u;
    return Eight(NAME_words[at], NAME_words[at + 1u]);
}

fn set_NAME_eight(i: u32, x: Eight, n: u32) {
    let at = (p.NAME_at + i) >> 2u;
    NAME_words[at] = x.low;
    NAME_words[at + 1u] = x.high;
}
