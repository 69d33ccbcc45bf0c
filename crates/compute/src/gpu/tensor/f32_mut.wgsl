fn set_NAME(i: u32, x: f32) { NAME_words[p.NAME_at + i] = x; }

// `both` is false at the end of an odd row: the second number is not there.
fn set_NAME_pair(i: u32, x: vec2<f32>, both: bool) {
    set_NAME(i, x.x);
    if both { set_NAME(i + 1u, x.y); }
}

fn put_NAME(i: u32, x: f32, add: u32) {
    if add != 0u { set_NAME(i, NAME(i) + x); } else { set_NAME(i, x); }
}

fn put_NAME_pair(i: u32, x: vec2<f32>, both: bool, add: u32) {
    put_NAME(i, x.x, add);
    if both { put_NAME(i + 1u, x.y, add); }
}
