// Four to a word.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<u32>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn NAME(i: u32) -> u32 {
    let at = p.NAME_at + i;
    return (NAME_words[at >> 2u] >> ((at & 3u) * 8u)) & 0xffu;
}

// Four that lie in one word; `i` and the tensor's start are multiples of four.
fn NAME_four(i: u32) -> vec4<u32> {
    return bytes_of(NAME_words[(p.NAME_at + i) >> 2u]);
}
