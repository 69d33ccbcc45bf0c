@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<u32>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }
fn NAME(i: u32) -> u32 { return NAME_words[p.NAME_at + i]; }
