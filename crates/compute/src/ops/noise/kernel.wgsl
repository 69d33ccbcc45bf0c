// Noise. A random sequence is six words: its seed, its index, and where it begins, the lower word of each first.

fn noise_at(sample: u32, index: u32) -> f32 {
    let at = 6u * sample;
    let stream = RandomSequence(vec2<u32>(streams(at), streams(at + 1u)), vec2<u32>(streams(at + 2u), streams(at + 3u)),
                        vec2<u32>(streams(at + 4u), streams(at + 5u)));
    return random_normal(stream, index);
}

// A thread for each element.
kernel sample_latents(latents: mut [f32], deviation: [f32], shift: [f32], scale: [f32], streams: [u32],
                      n: u32, per_sample: u32, per_channel: u32) {
    let at = thread;
    if at >= p.n { return; }
    let index = at % p.per_sample;
    let channel = index / p.per_channel;
    var x = latents(at);
    if has_deviation() { x += deviation(at) * noise_at(at / p.per_sample, index); }
    set_latents(at, (x - shift(channel)) * scale(channel));
}

// A thread for every two elements.
kernel add_noise(latents: mut [f32], noisy: mut [X], sigmas: [f32], streams: [u32], n: u32, per_sample: u32) {
    let at = 2u * thread;
    if at >= p.n { return; }
    let has_both = at + 1u < p.n;
    let first = mixed(at);
    var second = vec2<f32>(0.0);
    if has_both { second = mixed(at + 1u); }
    set_noisy_pair(at, vec2<f32>(first.x, second.x), has_both);
    set_latents_pair(at, vec2<f32>(first.y, second.y), has_both);
}

// A noisy number, and its velocity.
fn mixed(at: u32) -> vec2<f32> {
    let sample = at / p.per_sample;
    let sigma = sigmas(sample);
    let noise = noise_at(sample, at % p.per_sample);
    return vec2<f32>((1.0 - sigma) * latents(at) + sigma * noise, noise - latents(at));
}
