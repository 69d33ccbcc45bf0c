// Eight numbers to 16 bytes, which pass at once and are one thread's.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<vec4<u32>>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }

fn NAME_eight(i: u32, n: u32) -> Eight {
    let words = NAME_words[(p.NAME_at + i) >> 3u];
    return Eight(vec4<f32>(from_FORMAT(words.x), from_FORMAT(words.y)),
                 vec4<f32>(from_FORMAT(words.z), from_FORMAT(words.w)));
}

fn set_NAME_eight(i: u32, x: Eight, n: u32) {
    NAME_words[(p.NAME_at + i) >> 3u] = vec4<u32>(pack_FORMAT(x.low.xy), pack_FORMAT(x.low.zw),
                                                  pack_FORMAT(x.high.xy), pack_FORMAT(x.high.zw));
}
