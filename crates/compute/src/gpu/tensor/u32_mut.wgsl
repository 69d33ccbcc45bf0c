// Counted by many threads at once.
@group(0) @binding(BINDING) var<storage, read_write> NAME_words: array<atomic<u32>>;

fn add_NAME(i: u32, count: u32) { atomicAdd(&NAME_words[p.NAME_at + i], count); }
