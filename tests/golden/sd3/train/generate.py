"""Trains job.toml, own.toml and encoders.toml by PyTorch, diffusers and PEFT, and records the results.

    pip install torch diffusers transformers peft safetensors pillow numpy
    python generate.py           # draws images/, writes losses.txt, adapter.safetensors, own_losses.txt and encoders_*
    python generate.py --check   # trains again and prints the differences from the recorded files

The training is the plain loop of diffusers' train_dreambooth_lora_sd3.py: SD3Transformer2DModel with PEFT's
LoRA (in own.toml all of the model's own weights instead), torch.optim.AdamW, clip_grad_norm_, in f32 on a
CPU. In encoders.toml the CLIP text encoders get a LoRA too, as with that script's --train_text_encoder: prompts are then
encoded in every step, by the pipeline's own `encode_prompt`. Only random numbers are not torch's: each is a
function of the job's seed, of what it is for and of a number, by Philox4x32-10 (Salmon et al., SC 2011).
They are computed here anew, from this table:

| numbers | key | stream | read as |
|---|---|---|---|
| order of an epoch | seed ^ "order" | the epoch | words 0, 1, ...: Fisher and Yates, bucket by bucket, then batches |
| A of an adapter | seed for 0 | the layer, as the model is built | normal 0, 1, ..., divided by the rank |
| A of a text encoder's | seed for 10, plus its number | the layer, as it is built | the same |
| level of noise | seed for 1 | the draw | normal 2 |
| place in a latent's distribution | seed for 2 | the draw | normal 0, 1, ... |
| noise | seed for 3 | the draw | normal 0, 1, ... |

A draw is (batch << 16) | place in the batch, with batches counted over the whole run. The seed for a purpose
is words 0 and 1 of stream 0x686561727468 + purpose of the job's seed.

The same for FLUX.1 is `../../flux/train/generate.py`, and for Qwen-Image `../../qwen_image/train/generate.py`, which take
all but the model from here.

Two buckets with an odd number of images make batches of 1 and 2, so that what an image counts in a step
that gathers two batches is checked as well.
"""
import argparse
import os
import tomllib
from collections import defaultdict
from pathlib import Path

os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from peft import LoraConfig
from PIL import Image
from safetensors.torch import load_file, save_file

HERE = Path(__file__).resolve().parent

ADAPTERS, LEVELS, LATENTS, NOISE = range(4)
ENCODER_ADAPTERS = 10
FAMILY = 0x686561727468
ORDER = 0x6F72646572000000

# In the order in which the model is built; the last block has no to_add_out.
LAYERS = [f"attn.{layer}" for layer in ["to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj",
                                        "to_add_out"]]

CLIP_LAYERS = ["q_proj", "k_proj", "v_proj", "out_proj"]

# Sizes [width, height] and captions. All are sizes of buckets, so that nothing is scaled.
PICTURES = [
    ([80, 80], "a red fox in the snow"),
    ([80, 80], "two boats, calm sea"),
    ([96, 64], "a long road"),
    ([80, 80], "one lamp"),
    ([80, 80], ""),
    ([96, 64], "hills, evening light"),
    ([80, 80], "a cup of tea on a table"),
    ([96, 64], "a train"),
]


# --------------------------------------------------------------------------
# Random numbers
# --------------------------------------------------------------------------


def philox(key, counters):
    """Four words for each counter [n, 4]."""
    key = [np.uint64(word) for word in key]
    c = [counters[:, i].astype(np.uint64) for i in range(4)]
    low, shift = np.uint64(0xFFFFFFFF), np.uint64(32)
    for _ in range(10):
        a, b = c[0] * np.uint64(0xD2511F53), c[2] * np.uint64(0xCD9E8D57)
        c = [(b >> shift) ^ c[1] ^ key[0], b & low, (a >> shift) ^ c[3] ^ key[1], a & low]
        key = [(key[0] + np.uint64(0x9E3779B9)) & low, (key[1] + np.uint64(0xBB67AE85)) & low]
    return np.stack(c, axis=1)


def words(seed, stream, count):
    """The first words of a stream."""
    blocks = np.zeros((-(-count // 4), 4), dtype=np.uint64)
    blocks[:, 0] = np.arange(len(blocks))
    blocks[:, 2], blocks[:, 3] = stream & 0xFFFFFFFF, stream >> 32
    return philox([seed & 0xFFFFFFFF, seed >> 32], blocks).reshape(-1)[:count]


def uniforms(seed, stream, count):
    """Even over (0, 1), of 23 bits."""
    return ((words(seed, stream, count) >> np.uint64(9)).astype(np.float64) + 0.5) / 2**23


def normals(seed, stream, count):
    """Box-Muller: two normal draws of two uniform ones."""
    even = uniforms(seed, stream, count + count % 2).reshape(-1, 2)
    radius, angle = np.sqrt(-2 * np.log(even[:, 0])), 2 * np.pi * even[:, 1]
    both = np.stack([radius * np.cos(angle), radius * np.sin(angle)], axis=1)
    return both.reshape(-1)[:count].astype(np.float32)


def seed_for(seed, purpose):
    first, second = words(seed, FAMILY + purpose, 2)
    return int(first) << 32 | int(second)


def epoch_batches(sizes, batch, seed, epoch):
    """The batches of an epoch, as lists of images."""
    drawn = iter(words(seed ^ ORDER, epoch, 4 * len(sizes)))

    def shuffle(items):
        for last in range(len(items) - 1, 0, -1):
            other = int(next(drawn)) * (last + 1) >> 32
            items[last], items[other] = items[other], items[last]

    buckets = defaultdict(list)
    for index, size in enumerate(sizes):
        buckets[tuple(size)].append(index)
    batches = []
    for _, indices in sorted(buckets.items()):
        shuffle(indices)
        batches += [indices[at : at + batch] for at in range(0, len(indices), batch)]
    shuffle(batches)
    return batches


# --------------------------------------------------------------------------
# Training
# --------------------------------------------------------------------------


def draw_images(folder):
    """Waves of colour; nothing of them matters but that they differ."""
    folder.mkdir(exist_ok=True)
    for number, ([width, height], caption) in enumerate(PICTURES):
        y, x = np.mgrid[0:height, 0:width]
        waves = [np.sin(x * (number + 2) / 19 + c) * np.cos(y * (c + 2) / 23 + number) for c in range(3)]
        pixels = (127.5 + 127 * np.stack(waves, axis=-1)).astype(np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png", optimize=True)
        (folder / f"{number}.txt").write_text(caption)


def read_images(folder):
    """Pixels from -1 to 1 [1, 3, H, W] and captions, in the order of names."""
    for path in sorted(folder.glob("*.png")):
        pixels = torch.from_numpy(np.array(Image.open(path).convert("RGB"))).float() / 127.5 - 1
        yield pixels.permute(2, 0, 1)[None], path.with_suffix(".txt").read_text()


def trained_parameters(transformer, job, layers):
    """The adapter's, which is attached here, or all of the model's. `layers` are in the order in which the model is built;
    some may not exist."""
    if job["adapter"].get("kind") == "full":
        return list(transformer.requires_grad_(True).parameters())
    return adapter_parameters(transformer, job, layers, seed_for(job["train"]["seed"], ADAPTERS))


def adapter_parameters(model, job, layers, seed):
    """Those of a LoRA that is attached here, with A of this seed."""
    rank = job["adapter"]["rank"]
    model.requires_grad_(False)
    modules = dict(model.named_modules())
    layers = [layer for layer in layers if layer in modules]
    model.add_adapter(LoraConfig(r=rank, lora_alpha=job["adapter"]["alpha"], target_modules=layers))
    modules = dict(model.named_modules())
    for number, layer in enumerate(layers):
        down = modules[layer].lora_A.default.weight
        numbers = torch.from_numpy(normals(seed, number, down.numel())).reshape(down.shape)
        down.data.copy_(numbers / rank)
        assert not modules[layer].lora_B.default.weight.any()
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def numbers_like(tensor, seed, purpose, draw):
    return torch.from_numpy(normals(seed_for(seed, purpose), draw, tensor.numel())).reshape(tensor.shape)


class Trainer:
    pipeline_class = StableDiffusion3Pipeline
    # By hearth's names, in the order of folders.
    clips = {"clip-l": "text_encoder", "clip-g": "text_encoder_2"}

    def __init__(self, folder, job):
        self.job = job
        self.pipeline = self.pipeline_class.from_pretrained(folder / job["base"]["path"], torch_dtype=torch.float32)
        images = list(read_images(folder / job["data"]["images"]))
        self.samples = [self.encode(*image) for image in images]
        self.captions = [caption for _, caption in images]
        self.parameters = trained_parameters(self.pipeline.transformer, job, self.layers())
        self.encoder_parameters = self.train_encoders(job["adapter"].get("text_encoders", []))

    def train_encoders(self, names):
        found, seed = [], seed_for(self.job["train"]["seed"], ENCODER_ADAPTERS)
        self.trained = {name: getattr(self.pipeline, self.clips[name]) for name in names}
        for position, name in enumerate(self.clips, 1):
            if name not in names:
                continue
            model = self.trained[name]
            # In the order of blocks, and in each of these four.
            layers = [name for name, _ in model.named_modules() if name.rsplit(".")[-1] in CLIP_LAYERS]
            layers.sort(key=lambda name: (int(name.split("layers.")[1].split(".")[0]), CLIP_LAYERS.index(name.rsplit(".")[-1])))
            found += adapter_parameters(model, self.job, layers, seed + position)
        return found

    def layers(self):
        blocks = range(len(self.pipeline.transformer.transformer_blocks))
        return [f"transformer_blocks.{block}.{layer}" for block in blocks for layer in LAYERS]

    @torch.no_grad()
    def encode(self, pixels, caption):
        tokens, pooled = self.encode_caption(caption)
        return self.pipeline.vae.encode(pixels).latent_dist, tokens, pooled, pixels.shape[-1:-3:-1]

    def encode_caption(self, caption):
        tokens, _, pooled, _ = self.pipeline.encode_prompt(
            caption, None, None, do_classifier_free_guidance=False, max_sequence_length=256)
        return tokens, pooled

    def batch(self, number):
        """The images of a batch, counted over the whole run."""
        sizes = [size for *_, size in self.samples]
        job, epoch = self.job["train"], 0
        while True:
            batches = epoch_batches(sizes, job["batch_size"], job["seed"], epoch)
            if number < len(batches):
                return batches[number]
            number, epoch = number - len(batches), epoch + 1

    def noisy(self, index, draw):
        """The noisy latent of an image, its target, and its timestep."""
        job, scheduler = self.job["train"], self.pipeline.scheduler
        distribution = self.samples[index][0]
        mean = distribution.mean
        latent = mean + distribution.std * numbers_like(mean, job["seed"], LATENTS, draw)
        latent = self.scaled(latent)
        noise = numbers_like(mean, job["seed"], NOISE, draw)
        normal = float(normals(seed_for(job["seed"], LEVELS), draw, 3)[2])
        place = 1 / (1 + np.exp(-(job["logit_mean"] + job["logit_std"] * normal)))
        level = int(place * scheduler.config.num_train_timesteps)
        sigma = scheduler.sigmas[level]
        return (1 - sigma) * latent + sigma * noise, noise - latent, scheduler.timesteps[level]

    def scaled(self, latent):
        vae = self.pipeline.vae.config
        return (latent - vae.shift_factor) * vae.scaling_factor

    def loss(self, number):
        """The mean loss of a batch."""
        indices = self.batch(number)
        parts = [self.noisy(index, number << 16 | slot) for slot, index in enumerate(indices)]
        found = self.predict(
            latents=torch.cat([latents for latents, _, _ in parts]),
            timesteps=torch.stack([timestep for *_, timestep in parts]),
            **self.condition([self.sample(index) for index in indices]))
        return ((found - torch.cat([target for _, target, _ in parts])) ** 2).mean(), len(indices)

    def condition(self, samples):
        return dict(tokens=torch.cat([sample[1] for sample in samples]), pooled=torch.cat([sample[2] for sample in samples]))

    def sample(self, index):
        """With the caption as the text encoders encode it now, if some are trained."""
        latent, *encoded, size = self.samples[index]
        return latent, *(self.encode_caption(self.captions[index]) if self.trained else encoded), size

    def predict(self, latents, timesteps, tokens, pooled):
        return self.pipeline.transformer(
            hidden_states=latents, timestep=timesteps, encoder_hidden_states=tokens, pooled_projections=pooled).sample

    def factor(self, done):
        """Of the learning rate, after so many steps."""
        step, warmup, total = done + 1, self.job["optimizer"]["warmup_steps"], self.job["train"]["steps"]
        if step < warmup:
            return step / warmup
        return 0.5 * (1 + np.cos(np.pi * (step - warmup) / (total + 1 - warmup)))

    def train(self):
        settings, job = self.job["optimizer"], self.job["train"]
        groups = [dict(params=self.parameters)]
        if self.encoder_parameters:
            groups.append(dict(params=self.encoder_parameters, lr=self.job["adapter"]["text_encoder_learning_rate"]))
        everything = self.parameters + self.encoder_parameters
        optimizer = torch.optim.AdamW(
            groups, lr=settings["learning_rate"], betas=settings["betas"], eps=1e-8,
            weight_decay=settings["weight_decay"])
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self.factor)
        losses = []
        for step in range(job["steps"]):
            first = step * job["gradient_accumulation"]
            numbers = range(first, first + job["gradient_accumulation"])
            n_samples = sum(len(self.batch(number)) for number in numbers)
            losses.append(0.0)
            for number in numbers:
                loss, count = self.loss(number)
                (loss * count / n_samples).backward()
                losses[-1] += loss.item() * count / n_samples
            torch.nn.utils.clip_grad_norm_(everything, job["max_grad_norm"])
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        self.moments = {parameter: optimizer.state[parameter]["exp_avg"] for parameter in self.encoder_parameters}
        return losses

    def adapter(self):
        """By the names that diffusers saves."""
        named = self.pipeline.transformer.named_parameters()
        return {
            "transformer." + name.replace(".default.", "."): parameter.detach().contiguous()
            for name, parameter in named if parameter.requires_grad
        } | self.of_encoders(lambda parameter: parameter.detach())

    def of_encoders(self, value):
        """By the same names, which have a prefix that some versions of transformers leave out."""
        found = {}
        for encoder, model in self.trained.items():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    name = "text_model." + name.removeprefix("text_model.").replace(".default.", ".")
                    found[f"{self.clips[encoder]}.{name}"] = value(parameter).contiguous()
        return found


def main(folder, trainer_class, draws):
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    assert words(0, 0, 4).tolist() == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8], "not Philox"
    if draws and not check:
        draw_images(folder / "images")
    for job, file in [("job.toml", "losses.txt"), ("own.toml", "own_losses.txt")]:
        trainer = trainer_class(folder, tomllib.loads((folder / job).read_text()))
        record_losses(trainer.train(), folder / file, check)
        if job == "job.toml":
            record_adapter(trainer.adapter(), folder / "adapter.safetensors", check)
    if (folder / "encoders.toml").exists():
        trainer = trainer_class(folder, tomllib.loads((folder / "encoders.toml").read_text()))
        record_losses(trainer.train(), folder / "encoders_losses.txt", check)
        record_adapter(trainer.adapter(), folder / "encoders_adapter.safetensors", check)
        # What AdamW has of the encoders' gradients.
        record_adapter(trainer.of_encoders(trainer.moments.get), folder / "encoders_moments.safetensors", check)


def record_losses(losses, path, check):
    if check:
        recorded = [float(line.split()[1]) for line in path.read_text().splitlines()]
        print(path.name, max(abs(new / old - 1) for new, old in zip(losses, recorded, strict=True)))
    else:
        path.write_text("".join(f"{step} {loss:.9g}\n" for step, loss in enumerate(losses, 1)))


def record_adapter(adapter, path, check):
    if not check:
        return save_file(adapter, path)
    recorded = load_file(path)
    assert recorded.keys() == adapter.keys()
    apart = ((adapter[key] - old).abs().max() / old.abs().max().clamp_min(1e-30) for key, old in recorded.items())
    print(path.name, max(apart).item())


if __name__ == "__main__":
    main(HERE, Trainer, draws=True)
