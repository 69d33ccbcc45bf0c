// Eight to 8 bytes, which pass at once.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<vec2<u32>>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn NAME_eight(i: u32, n: u32) -> Codes {
    let words = NAME_words[(p.NAME_at + i) >> 3u];
    return Codes(bytes_of(words.x), bytes_of(words.y));
}
