// Bytes set and copied, a thread for every word of what is written.

kernel fill(bytes: mut [u8], n: u32, pattern: u32) {
    let first = p.bytes_at;
    let end = first + p.n;
    let word = (first >> 2u) + thread;
    if 4u * word >= end { return; }
    // A word at either end may be another tensor's in part.
    var mask = 0u;
    for (var i = 0u; i < 4u; i++) {
        let at = 4u * word + i;
        if at >= first && at < end { mask |= 0xffu << (8u * i); }
    }
    bytes_words[word] = (bytes_words[word] & ~mask) | (p.pattern & mask);
}

// What is copied may start anywhere.
kernel copy(source: [u8], bytes: mut [u8], n: u32) {
    let at = 4u * thread;
    if at >= p.n { return; }
    set_bytes_four(at, vec4<u32>(source(at), source(at + 1u), source(at + 2u), source(at + 3u)));
}

// The last kernel of a command buffer: writes its number when it and all before it are done. One workgroup.
kernel canary(place: mut [u8], number: u32) {
    if thread == 0u && place_words[0] == p.number - 1u { place_words[0] = p.number; }
}
