"""The job of `hearth bench train` in diffusers, transformers, PEFT and PyTorch, as diffusers' own
training script for SD3 does it: images and captions are encoded once, then adapters are trained.

    python train.py '{"part": "encode", "folder": "FOLDER", "dtype": "f32", "resolution": 128, "batch": 4,
                      "steps": 20, "threads": 2}'

FOLDER has `model` and `images`; `"part": "encode"` writes `peer.safetensors` there, which
`"part": "train"` reads. Prints one JSON object with the figures that hearth prints for the same part.
"""
import json
import statistics
import sys
import time
from pathlib import Path

import numpy
import torch
from safetensors.torch import load_file, save_file

WARM_UP, RANK, RATE, LONGEST = 3, 16, 1e-4, 1.0
TARGETS = ["attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
           "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out"]


def status(field):
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def encode(job, folder, dtype):
    from diffusers import AutoencoderKL, SD3Transformer2DModel, StableDiffusion3Pipeline
    from PIL import Image

    yield
    model, side, encoded = folder / "model", job["resolution"], {}
    vae = AutoencoderKL.from_pretrained(model / "vae", torch_dtype=torch.float32)
    # What is not needed is not held.
    del vae.decoder
    paths = sorted((folder / "images").glob("*.png"))
    for path in paths:
        with Image.open(path) as image:
            image = image.convert("RGB").resize((side, side), Image.Resampling.LANCZOS)
            numbers = torch.from_numpy(numpy.array(image)).permute(2, 0, 1)[None].float() / 127.5 - 1
        latents = vae.encode(numbers).latent_dist
        encoded[f"{path.stem}.mean"], encoded[f"{path.stem}.std"] = latents.mean[0], latents.std[0]
    del vae
    # The pipeline asks the transformer for a width and nothing else.
    with torch.device("meta"):
        transformer = SD3Transformer2DModel.from_config(SD3Transformer2DModel.load_config(model / "transformer"))
    pipeline = StableDiffusion3Pipeline.from_pretrained(
        model, transformer=transformer, vae=None, torch_dtype=dtype)
    captions = {path.stem: path.with_suffix(".txt").read_text().strip() for path in paths}
    for name, caption in {**captions, "": ""}.items():
        tokens, _, pooled, _ = pipeline.encode_prompt(
            caption, None, None, do_classifier_free_guidance=False, device="cpu")
        encoded[f"{name}.tokens"], encoded[f"{name}.pooled"] = tokens[0], pooled[0]
    save_file({name: tensor.contiguous() for name, tensor in encoded.items()}, folder / "peer.safetensors")
    yield len(paths)


def train(job, folder, dtype):
    from diffusers import FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel
    from diffusers.training_utils import compute_density_for_timestep_sampling
    from peft import LoraConfig

    yield
    model = SD3Transformer2DModel.from_pretrained(folder / "model/transformer", torch_dtype=dtype)
    model.requires_grad_(False)
    model.add_adapter(LoraConfig(r=RANK, lora_alpha=RANK, init_lora_weights="gaussian", target_modules=TARGETS))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in trained:
        parameter.data = parameter.data.float()
    with open(folder / "model/vae/config.json") as file:
        vae = json.load(file)
    noises = FlowMatchEulerDiscreteScheduler.from_pretrained(folder / "model/scheduler")
    encoded = load_file(folder / "peer.safetensors")
    names = sorted({name.rsplit(".", 1)[0] for name in encoded if name.endswith(".mean")})
    optimizer = torch.optim.AdamW(trained, lr=RATE, fused=True)
    while True:
        order = torch.randperm(len(names)).tolist()
        chosen = [names[order[index % len(names)]] for index in range(job["batch"])]
        gather = lambda what: torch.stack([encoded[f"{name}.{what}"] for name in chosen])
        mean, std = gather("mean"), gather("std")
        latents = (mean + std * torch.randn_like(mean) - vae["shift_factor"]) * vae["scaling_factor"]
        noise = torch.randn_like(latents)
        places = compute_density_for_timestep_sampling("logit_normal", len(chosen), 0.0, 1.0)
        indices = (places * noises.config.num_train_timesteps).long()
        sigmas = noises.sigmas[indices].view(-1, 1, 1, 1)
        noisy = ((1 - sigmas) * latents + sigmas * noise).to(dtype)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            found = model(hidden_states=noisy, timestep=noises.timesteps[indices],
                          encoder_hidden_states=gather("tokens").to(dtype),
                          pooled_projections=gather("pooled").to(dtype)).sample
        (found.float() - (noise - latents)).square().mean().backward()
        torch.nn.utils.clip_grad_norm_(trained, LONGEST)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        yield


def main(job):
    torch.set_num_threads(job["threads"])
    torch.manual_seed(0)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[job["dtype"]]
    is_training = job["part"] == "train"
    work = (train if is_training else encode)(job, Path(job["folder"]), dtype)
    walls, cpus = [], []
    with torch.set_grad_enabled(is_training):
        # Up to here only libraries are loaded.
        next(work)
        before = status("VmRSS")
        for step in range(WARM_UP + job["steps"] if is_training else 1):
            wall, cpu = time.perf_counter(), time.process_time()
            images = next(work)
            if step >= WARM_UP or not is_training:
                walls.append((time.perf_counter() - wall) * 1e3 / (images or 1))
                cpus.append((time.process_time() - cpu) * 1e3 / job["threads"] / (images or 1))
    print(json.dumps({
        "ms_median": statistics.median(walls), "cpu_ms_median": statistics.median(cpus),
        "rss_peak_bytes": status("VmHWM"), "rss_before_bytes": before, "version": torch.__version__,
    }))


main(json.loads(sys.argv[1]))
