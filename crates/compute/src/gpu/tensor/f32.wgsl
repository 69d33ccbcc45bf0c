@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<f32>;

fn has_NAME() -> bool { return p.NAME_at != NONE; }
fn NAME(i: u32) -> f32 { return NAME_words[p.NAME_at + i]; }
fn NAME_pair(i: u32) -> vec2<f32> { return vec2<f32>(NAME(i), NAME(i + 1u)); }
