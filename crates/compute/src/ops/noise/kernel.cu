// Noise, a thread for each element. A random sequence is three numbers: its seed, its index, and where it begins.

DEVICE float noise_at(const u64* streams, u64 sample, u64 index) {
    const u64* of = streams + 3 * sample;
    return random_normal(of[0], of[1], of[2] + index);
}

KERNEL sample_latents(float* latents, const float* deviation, const float* shift, const float* scale,
                      const u64* streams, u64 n, u64 per_sample, u64 per_channel) {
    u64 at = thread();
    if (at >= n) return;
    u64 index = at % per_sample, channel = index / per_channel;
    float x = latents[at];
    if (deviation) x += deviation[at] * noise_at(streams, at / per_sample, index);
    latents[at] = (x - shift[channel]) * scale[channel];
}

KERNEL add_noise(float* latents, X* noisy, const float* sigmas, const u64* streams, u64 n, u64 per_sample) {
    u64 at = thread();
    if (at >= n) return;
    u64 sample = at / per_sample;
    float x = latents[at], sigma = sigmas[sample], noise = noise_at(streams, sample, at % per_sample);
    noisy[at] = from_f32<X>((1.0f - sigma) * x + sigma * noise);
    latents[at] = noise - x;
}
