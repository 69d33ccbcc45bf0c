// Two numbers to a word. A tensor may start in the middle of one.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<u32>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn NAME(i: u32) -> f32 {
    let at = p.NAME_at + i;
    let both = from_FORMAT(NAME_words[at >> 1u]);
    return select(both.x, both.y, (at & 1u) == 1u);
}

fn NAME_pair(i: u32) -> vec2<f32> {
    let at = p.NAME_at + i;
    if (at & 1u) == 0u { return from_FORMAT(NAME_words[at >> 1u]); }
    return vec2<f32>(NAME(i), NAME(i + 1u));
}
