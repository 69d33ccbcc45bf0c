// Images as tokens and back, a thread for every two elements of what is written.

kernel patchify(image: [X], tokens: mut [X], n: u32, channels: u32, height: u32, width: u32, side: u32,
                order: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_tokens_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

// What lies at a place of the tokens. ORDER 0 is (channel, row, column), 1 (row, column, channel).
fn one(at: u32) -> f32 {
    let token_width = p.channels * p.side * p.side;
    let inner = at % token_width;
    let token = at / token_width;
    let across = p.width / p.side;
    let down = p.height / p.side;
    let sample = token / (across * down);
    var channel = inner / (p.side * p.side);
    var pixel = inner % (p.side * p.side);
    if p.order == 1u {
        channel = inner % p.channels;
        pixel = inner / p.channels;
    }
    let row = token / across % down * p.side + pixel / p.side;
    let column = token % across * p.side + pixel % p.side;
    return image(((sample * p.channels + channel) * p.height + row) * p.width + column);
}

kernel unpatchify(tokens: [X], image: mut [X], n: u32, channels: u32, height: u32, width: u32, side: u32,
                  order: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    set_image_pair(at, vec2<f32>(one(at), one(at + 1u)), at + 1u < p.n);
}

// What lies at a place of the image.
fn one(at: u32) -> f32 {
    let column = at % p.width;
    let row = at / p.width % p.height;
    let channel = at / p.width / p.height % p.channels;
    let sample = at / p.width / p.height / p.channels;
    let token = (sample * (p.height / p.side) + row / p.side) * (p.width / p.side) + column / p.side;
    let pixel = row % p.side * p.side + column % p.side;
    var inner = channel * p.side * p.side + pixel;
    if p.order == 1u { inner = pixel * p.channels + channel; }
    return tokens(token * p.channels * p.side * p.side + inner);
}
