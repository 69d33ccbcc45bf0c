// Two numbers to a word, which two threads may share where a row or a tensor ends in the middle of one.
// Each of them clears and sets its own half of it then, in whatever order; whole words are stored.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<atomic<u32>>;

fn NAME(i: u32) -> f32 {
    let at = p.NAME_at + i;
    let both = from_FORMAT(atomicLoad(&NAME_words[at >> 1u]));
    return select(both.x, both.y, (at & 1u) == 1u);
}

fn NAME_pair(i: u32) -> vec2<f32> {
    let at = p.NAME_at + i;
    if (at & 1u) == 0u { return from_FORMAT(atomicLoad(&NAME_words[at >> 1u])); }
    return vec2<f32>(NAME(i), NAME(i + 1u));
}

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn set_NAME(i: u32, x: f32) {
    let at = p.NAME_at + i;
    let shift = (at & 1u) * 16u;
    atomicAnd(&NAME_words[at >> 1u], ~(0xffffu << shift));
    atomicOr(&NAME_words[at >> 1u], to_FORMAT(x) << shift);
}

// `both` is false at the end of an odd row: the second number is not there.
fn set_NAME_pair(i: u32, x: vec2<f32>, both: bool) {
    let at = p.NAME_at + i;
    if both && (at & 1u) == 0u {
        atomicStore(&NAME_words[at >> 1u], pack_FORMAT(x));
        return;
    }
    set_NAME(i, x.x);
    if both { set_NAME(i + 1u, x.y); }
}

fn put_NAME(i: u32, x: f32, add: u32) {
    if add != 0u { set_NAME(i, NAME(i) + x); } else { set_NAME(i, x); }
}

fn put_NAME_pair(i: u32, x: vec2<f32>, both: bool, add: u32) {
    if add != 0u { set_NAME_pair(i, NAME_pair(i) + x, both); } else { set_NAME_pair(i, x, both); }
}
