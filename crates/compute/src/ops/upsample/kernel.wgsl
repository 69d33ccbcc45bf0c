// Enlarging images and clips, a thread for every two pixels of the result.

kernel upsample(x: [X], y: mut [X], n: u32, frames: u32, all_frames: u32, tall: u32, wide: u32, times: u32,
                side: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_y_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

fn one(at: u32) -> f32 {
    let line = at / p.wide;
    let plane = line / p.tall;
    let frame = (plane % p.all_frames + p.times - 1u) / p.times;
    let row = (plane / p.all_frames * p.frames + frame) * (p.tall / p.side) + line % p.tall / p.side;
    return x(row * (p.wide / p.side) + at % p.wide / p.side);
}
