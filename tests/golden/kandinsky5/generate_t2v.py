"""Makes `t2v_pipeline/`, what is its own of a tiny Kandinsky 5 for clips with random weights, and trains `t2v_train/job.toml` with
it by PyTorch, diffusers and PEFT. Text encoders and tokenizers are those of other folders, as `PARTS` says. Made on a CPU in
f32 with torch 2.15, diffusers 0.42.1, transformers 5.23.0, peft 0.21.2, Pillow and safetensors, all from PyPI.

    python generate_t2v.py           # makes the pipeline and t2v_train/data/, writes losses.txt and adapter.safetensors
    python generate_t2v.py --check   # trains again and prints the differences from the recorded files

Clips are an animated PNG, of which the first 13 frames are seen, and folders of frames; images are clips of one frame. The
first folder has a frame too many for the VAE. None is so long that the VAE cuts it in time, where diffusers and hearth blend
in other ways. All have the size of their bucket, so that nothing is scaled. Random numbers and the loop are those of `../sd3/train/generate.py`; samples of a batch are computed
one by one, so that no prompt sees the padding of another, as in the authors' program.
"""

import copy
import importlib.util
import json
import os
import shutil
import sys
import tomllib
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import numpy as np
import torch
from diffusers import (AutoencoderKLHunyuanVideo, FlowMatchEulerDiscreteScheduler, Kandinsky5T2VPipeline,
                       Kandinsky5Transformer3DModel)
from PIL import Image
from transformers import CLIPTextModel, CLIPTokenizer, Qwen2_5_VLForConditionalGeneration, Qwen2Tokenizer

HERE = Path(__file__).resolve().parent


def module(name, path):
    sys.path.insert(0, str(path.parent))
    found = importlib.util.module_from_spec(importlib.util.spec_from_file_location(name, path))
    found.__spec__.loader.exec_module(found)
    sys.path.pop(0)
    return found


shared = module("shared", HERE.parent / "sd3/train/generate.py")
randomise = module("sd3", HERE.parent / "sd3/generate.py").randomise
own = module("own", HERE / "generate.py")

PARTS = {
    "text_encoder": "qwen_image/pipeline/text_encoder", "tokenizer": "qwen_image/pipeline/tokenizer",
    "text_encoder_2": "flux/dev/pipeline/text_encoder", "tokenizer_2": "flux/dev/pipeline/tokenizer",
}
SHIFT = 5.0
# The tiny tokenizer makes many tokens of the template.
LENGTH = 400
# As job.toml has it.
FRAMES = 13
# In the order in which the model is built.
ATTENTION = ["to_query", "to_key", "to_value", "out_layer"]
CAPTIONS = {"run": "a dog runs", "walk": "a red fox walks through the snow", "anim": "it turns", "0": "a long road", "1": ""}


def make_pipeline(folder, seed):
    shutil.rmtree(folder, ignore_errors=True)
    model = randomise(Kandinsky5Transformer3DModel(
        in_visual_dim=4, out_visual_dim=4, in_text_dim=32, in_text_dim2=32, time_dim=10, patch_size=(1, 2, 2), model_dim=24,
        ff_dim=28, num_text_blocks=1, num_visual_blocks=2, axes_dims=(4, 4, 4), visual_cond=True), seed)
    vae = randomise(AutoencoderKLHunyuanVideo(
        latent_channels=4, block_out_channels=(4, 4, 8, 8), layers_per_block=1, norm_num_groups=2), seed + 1)
    for part, name in [(model, "transformer"), (vae, "vae")]:
        copy.deepcopy(part).to(torch.bfloat16).save_pretrained(folder / name)  # half the size
    FlowMatchEulerDiscreteScheduler(shift=SHIFT).save_pretrained(folder / "scheduler")
    index = {"_class_name": "Kandinsky5T2VPipeline", "_diffusers_version": "0.42.1", "max_sequence_length": LENGTH,
             "scheduler": ["diffusers", "FlowMatchEulerDiscreteScheduler"],
             "text_encoder": ["transformers", "Qwen2_5_VLForConditionalGeneration"],
             "text_encoder_2": ["transformers", "CLIPTextModel"], "tokenizer": ["transformers", "Qwen2VLProcessor"],
             "tokenizer_2": ["transformers", "CLIPTokenizer"],
             "transformer": ["diffusers", "Kandinsky5Transformer3DModel"], "vae": ["diffusers", "AutoencoderKLHunyuanVideo"]}
    (folder / "model_index.json").write_text(json.dumps(index, indent=1) + "\n")


class Processor:
    """Of a Qwen2VLProcessor, what the pipeline uses; the real one needs an image processor too."""
    def __init__(self, words):
        self.words = words

    def __call__(self, text, images=None, videos=None, **settings):
        return self.words(text, **settings)

    def decode(self, tokens):
        return self.words.decode(tokens)


def load(folder):
    f32 = dict(torch_dtype=torch.float32)
    part = lambda name: HERE.parent / PARTS[name]
    pipeline = Kandinsky5T2VPipeline(
        transformer=Kandinsky5Transformer3DModel.from_pretrained(folder / "transformer", **f32),
        vae=AutoencoderKLHunyuanVideo.from_pretrained(folder / "vae", **f32),
        text_encoder=Qwen2_5_VLForConditionalGeneration.from_pretrained(part("text_encoder"), **f32), tokenizer=None,
        text_encoder_2=CLIPTextModel.from_pretrained(part("text_encoder_2"), **f32),
        tokenizer_2=CLIPTokenizer.from_pretrained(part("tokenizer_2")),
        scheduler=FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "scheduler"))
    pipeline.tokenizer = Processor(Qwen2Tokenizer.from_pretrained(part("tokenizer")))
    return pipeline


def frame(number, at, width, height):
    """A square that wanders over a gradient."""
    y, x = np.mgrid[0:height, 0:width]
    image = np.stack([x * 2 + 8 * number, y * 3, np.full_like(x, 9 * at)], -1).astype(np.uint8)
    left, top = 3 * at % (width - 20), 7 * number % (height - 20)
    image[top : top + 20, left : left + 20] = [250 - 20 * number, 250 - 10 * at, 20]
    return Image.fromarray(image)


def draw(folder):
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for number, (name, count) in enumerate([("run", 10), ("walk", 9)]):
        (folder / name).mkdir()
        for at in range(count):
            frame(number, at, 96, 64).save(folder / name / f"frame_{at + 1}.png", optimize=True)
    frames = [frame(2, at, 96, 64) for at in range(15)]
    frames[0].save(folder / "anim.png", save_all=True, append_images=frames[1:], duration=50)
    for number, (width, height) in enumerate([(96, 64), (80, 80)]):
        frame(3 + number, 5, width, height).save(folder / f"{number}.png", optimize=True)
    for name, caption in CAPTIONS.items():
        (folder / f"{name}.txt").write_text(caption)


def read(folder):
    """Pixels from -1 to 1 [1, 3, T, H, W] and captions, in the order of paths."""
    def frames(path):
        if path.is_dir():
            paths = sorted(path.glob("*.png"), key=lambda path: int(path.stem.split("_")[1]))
            return [Image.open(path) for path in paths]
        image = Image.open(path)
        found = []
        for at in range(getattr(image, "n_frames", 1)):
            image.seek(at)
            found.append(image.copy())
        return found
    for path in sorted(path for path in folder.iterdir() if path.suffix != ".txt"):
        pixels = np.stack([np.array(image.convert("RGB")) for image in frames(path)])
        pixels = pixels[: (min(len(pixels), FRAMES) - 1) // 4 * 4 + 1]
        pixels = torch.from_numpy(pixels).float() / 127.5 - 1
        yield pixels.permute(3, 0, 1, 2)[None], path.with_suffix(".txt").read_text()


class VideoTrainer(shared.Trainer):
    def __init__(self, folder, job):
        self.job = job
        self.pipeline = load(folder.parent / "t2v_pipeline")
        self.samples = [self.encode(*sample) for sample in read(folder / job["data"]["images"])]
        self.parameters = shared.trained_parameters(self.pipeline.transformer, job, self.layers())

    def layers(self):
        model = self.pipeline.transformer
        text = [f"text_transformer_blocks.{index}.self_attention.{layer}"
                for index in range(len(model.text_transformer_blocks)) for layer in ATTENTION]
        return text + [f"visual_transformer_blocks.{index}.{kind}_attention.{layer}"
                       for index in range(len(model.visual_transformer_blocks)) for kind in ["self", "cross"]
                       for layer in ATTENTION]

    @torch.no_grad()
    def encode(self, pixels, caption):
        tokens, pooled, _ = self.pipeline.encode_prompt(caption, max_sequence_length=LENGTH)
        _, _, frames, height, width = pixels.shape
        return self.pipeline.vae.encode(pixels).latent_dist, tokens, pooled, (width, height, frames)

    def scaled(self, latent):
        return latent * self.pipeline.vae.config.scaling_factor

    def condition(self, samples):
        return dict(prompts=[sample[1:3] for sample in samples])

    def predict(self, latents, timesteps, prompts):
        found = []
        for latent, timestep, (tokens, pooled) in zip(latents, timesteps, prompts):
            latent = latent.permute(1, 2, 3, 0)[None]
            _, frames, height, width, channels = latent.shape
            given = torch.zeros(1, frames, height, width, channels + 1)
            out = self.pipeline.transformer(
                hidden_states=torch.cat([latent, given], dim=-1), encoder_hidden_states=tokens, pooled_projections=pooled,
                timestep=timestep[None], text_rope_pos=torch.arange(tokens.shape[1]), scale_factor=(1, 3.16, 3.16),
                visual_rope_pos=[torch.arange(n) for n in [frames, height // 2, width // 2]]).sample
            found.append(out.permute(0, 4, 1, 2, 3))
        return torch.cat(found)


def main():
    own.without_rounding()
    check, train = "--check" in sys.argv, HERE / "t2v_train"
    if not check:
        make_pipeline(HERE / "t2v_pipeline", 9300)
        draw(train / "data")
    trainer = VideoTrainer(train, tomllib.loads((train / "job.toml").read_text()))
    shared.record_losses(trainer.train(), train / "losses.txt", check)
    shared.record_adapter(trainer.adapter(), train / "adapter.safetensors", check)


if __name__ == "__main__":
    main()
