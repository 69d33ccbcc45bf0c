"""Makes the forms in which people share FLUX.1, tiny and with random weights, and what diffusers computes with them:
GGUF files of the transformer, fp8 checkpoints with and without scales, and the names of the VAE in `ae.safetensors`.
Made on a CPU in f32 with torch 2.15, diffusers 0.42.1, gguf 0.19.0 and safetensors, all from PyPI.

    python files.py

files/NAME/config.json                 of the transformer
files/NAME/FILE.{gguf,safetensors}     its weights under the names of the original checkpoints
files/NAME/FILE.golden.safetensors     inputs, and the outputs of diffusers' model with the dequantised weights
files/names.json                       for parts of a pipeline, the original names by diffusers' names
"""

import json
from pathlib import Path

import gguf
import numpy as np
import torch
from diffusers import AutoencoderKL, FluxTransformer2DModel
from diffusers.loaders import single_file_utils
from safetensors import safe_open
from safetensors.torch import save_file

from generate import converter, draw, original

HERE = Path(__file__).resolve().parent / "files"
TYPE = gguf.GGMLQuantizationType
PREFIX = "model.diffusion_model."

# Rows of 64, 256 and 320 values: whole blocks of 32, and for some tensors of 256.
GGUF = dict(layers=1, singles=1, heads=2, head=32, axes=[8, 12, 12], joint=256, pooled=32, guided=True, size=(2, 3), text=4)
FP8 = dict(layers=1, singles=2, heads=2, head=16, axes=[4, 4, 8], joint=24, pooled=20, guided=False, size=(2, 2), text=3)

# Of 32 values; the package quantises to these.
SMALL = [TYPE.Q8_0, TYPE.Q4_0, TYPE.Q4_1, TYPE.Q5_0, TYPE.Q5_1]
# Of 256 values, with the places of their scales; the package only reads these, so they are random bytes.
LARGE = [(TYPE.Q4_K, [0, 2]), (TYPE.Q5_K, [0, 2]), (TYPE.Q6_K, [208]), (TYPE.Q2_K, [80, 82]), (TYPE.Q3_K, [108])]


def random_blocks(random, kind, scales_at, shape):
    values, size = gguf.GGML_QUANT_SIZES[kind]
    blocks = random.integers(0, 256, (shape[0] * shape[1] // values, size), dtype=np.uint8)
    for at in scales_at:
        spread = {TYPE.Q6_K: 5e-5, TYPE.Q2_K: 3e-3, TYPE.Q3_K: 1e-3}.get(kind, 2e-4)
        blocks[:, at:at + 2] = random.normal(0, spread, len(blocks)).astype("<f2").view(np.uint8).reshape(-1, 2)
    return blocks.reshape(shape[0], -1)


def write_gguf(path, weights):
    """A file with every type; returns what the package reads from it."""
    writer = gguf.GGUFWriter(path, "flux")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    random, found, n_small, n_large = np.random.default_rng(3), {}, 0, 0
    for name, tensor in weights.items():
        values = tensor.numpy()
        if values.ndim < 2:
            writer.add_tensor(name, values)
            found[name] = tensor
            continue
        if values.shape[1] % 256 == 0:
            kind, scales_at = LARGE[n_large % len(LARGE)]
            stored, n_large = random_blocks(random, kind, scales_at, values.shape), n_large + 1
        elif name == "img_in.weight":
            kind, stored = TYPE.F16, values.astype(np.float16)
        elif name == "final_layer.linear.weight":
            kind, stored = TYPE.BF16, gguf.quantize(values, TYPE.BF16)
        else:
            kind = SMALL[n_small % len(SMALL)]
            stored, n_small = gguf.quantize(values, kind), n_small + 1
        writer.add_tensor(name, stored, raw_dtype=kind)
        found[name] = torch.from_numpy(gguf.dequantize(stored, kind).astype(np.float32)).reshape(tensor.shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return found


def is_quantised(name, tensor):
    return tensor.ndim == 2 and "_blocks." in name


def scaled(weights):
    """As ComfyUI's files up to 2025: one scale, a marker, a prefix."""
    stored, found = {PREFIX + "scaled_fp8": torch.zeros(2, dtype=torch.float8_e4m3fn)}, {}
    for name, tensor in weights.items():
        if not is_quantised(name, tensor):
            stored[PREFIX + name] = tensor.bfloat16()
            found[name] = tensor.bfloat16().float()
            continue
        scale = tensor.abs().max() / 448
        stored[PREFIX + name] = (tensor / scale).to(torch.float8_e4m3fn)
        layer = PREFIX + name.removesuffix(".weight")
        stored[f"{layer}.scale_weight"], stored[f"{layer}.scale_input"] = scale, torch.tensor(0.5)
        found[name] = stored[PREFIX + name].float() * scale
    return stored, found


def rows(weights):
    """As newer files: a scale for each row, of one or two dimensions, or one for all; two kinds of fp8."""
    stored, found = {}, {}
    for index, (name, tensor) in enumerate(weights.items()):
        if not is_quantised(name, tensor):
            stored[name] = tensor
            found[name] = tensor
            continue
        dtype = [torch.float8_e4m3fn, torch.float8_e5m2][index % 2]
        scale = tensor.abs().amax(1, keepdim=True) / 400
        scale = [scale, scale.flatten(), scale.max()][index % 3]
        factor = scale if scale.ndim != 1 else scale[:, None]
        stored[name] = (tensor / factor).to(dtype)
        layer = name.removesuffix(".weight")
        about = json.dumps({"format": str(dtype).removeprefix("torch.")}).encode()
        stored[f"{layer}.weight_scale"], stored[f"{layer}.input_scale"] = scale, torch.tensor(2.0)
        stored[f"{layer}.comfy_quant"] = torch.tensor(list(about), dtype=torch.uint8)
        found[name] = stored[name].float() * factor
    return stored, found


def cast(weights):
    """Without scales: every matrix is cast."""
    stored = {name: tensor.to(torch.float8_e4m3fn) if tensor.ndim == 2 else tensor.half() for name, tensor in weights.items()}
    return stored, {name: tensor.float() for name, tensor in stored.items()}


def transformer(m):
    return FluxTransformer2DModel(
        patch_size=1, in_channels=64, num_layers=m["layers"], num_single_layers=m["singles"],
        attention_head_dim=m["head"], num_attention_heads=m["heads"], joint_attention_dim=m["joint"],
        pooled_projection_dim=m["pooled"], guidance_embeds=m["guided"], axes_dims_rope=tuple(m["axes"]))


@torch.no_grad()
def golden(m, found, path):
    model = transformer(m)
    model.load_state_dict(converter(m["heads"] * m["head"])(dict(found)), strict=True)
    lines, columns = m["size"]
    torch.manual_seed(5)
    inputs = {
        "hidden_states": torch.randn(2, lines * columns, 64),
        "encoder_hidden_states": torch.randn(2, m["text"], m["joint"]),
        "pooled_projections": torch.randn(2, m["pooled"]),
        "timestep": torch.tensor([0.8125, 0.2031]),
        "img_ids": torch.tensor([[0, line, column] for line in range(lines) for column in range(columns)]).float(),
        "txt_ids": torch.zeros(m["text"], 3),
    }
    if m["guided"]:
        inputs["guidance"] = torch.tensor([1.0, 0.4375])
    out = {"out.sample": model(**inputs, return_dict=False)[0]}
    assert out["out.sample"].isfinite().all()
    save_file(out | {f"in.{name}": tensor for name, tensor in inputs.items()}, path)


def make(name, m, forms):
    folder = HERE / name
    folder.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(len(name))
    weights = draw(original(m))
    config = {"_class_name": "FluxTransformer2DModel"} | {
        key: list(value) if isinstance(value, tuple) else value
        for key, value in transformer(m).config.items() if not key.startswith("_")}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    for file, form in forms.items():
        if file.endswith(".gguf"):
            found = form(folder / file, weights)
        else:
            stored, found = form(weights)
            save_file({key: tensor.contiguous() for key, tensor in stored.items()}, folder / file)
        golden(m, found, folder / f"{file.rsplit('.')[0]}.golden.safetensors")


def original_vae_names():
    """Of the pipelines' VAE: which original tensor diffusers' converter takes for each of its own."""
    folder = HERE.parent / "dev" / "pipeline" / "vae"
    model = AutoencoderKL.from_pretrained(folder)
    n = len(model.config.block_out_channels)
    names = []

    def resnet(theirs, shortcut):
        for layer in ["norm1", "conv1", "norm2", "conv2"] + ["nin_shortcut"] * shortcut:
            names.extend([f"{theirs}.{layer}.weight", f"{theirs}.{layer}.bias"])

    own = set(model.state_dict())
    for side, levels, layers in [("encoder", "down", model.config.layers_per_block),
                                 ("decoder", "up", model.config.layers_per_block + 1)]:
        for layer in ["conv_in", "norm_out", "conv_out"]:
            names.extend([f"{side}.{layer}.weight", f"{side}.{layer}.bias"])
        for layer in ["norm", "q", "k", "v", "proj_out"]:
            names.extend([f"{side}.mid.attn_1.{layer}.weight", f"{side}.mid.attn_1.{layer}.bias"])
        for block in [1, 2]:
            resnet(f"{side}.mid.block_{block}", False)
        for level in range(n):
            for layer in range(layers):
                at = level if side == "encoder" else n - 1 - level
                resnet(f"{side}.{levels}.{level}.block.{layer}",
                       f"{side}.{levels}_blocks.{at}.resnets.{layer}.conv_shortcut.weight" in own)
        ends = range(n - 1) if side == "encoder" else range(1, n)
        sampler = "downsample" if side == "encoder" else "upsample"
        for level in ends:
            names.extend([f"{side}.{levels}.{level}.{sampler}.conv.{end}" for end in ["weight", "bias"]])
    # Matrices of attention are 1x1 convolutions there; the converter squeezes them.
    marked = {name: torch.full((1, 1, 1, 1) if ".attn_1." in name and ".norm." not in name and name.endswith("weight") else (1,), float(at))
              for at, name in enumerate(names)}
    converted = single_file_utils.convert_ldm_vae_checkpoint(marked, dict(model.config))
    assert set(converted) == own, set(converted) ^ own
    return {name: names[int(tensor.flatten()[0])] for name, tensor in sorted(converted.items())}


def original_transformer_names():
    """Of the pipelines' transformer: the original tensor and its rows for each of diffusers'."""
    places = {}
    for variant in ["dev", "schnell"]:
        config = json.loads((HERE.parent / variant / "pipeline" / "transformer" / "config.json").read_text())
        m = dict(layers=config["num_layers"], singles=config["num_single_layers"], heads=config["num_attention_heads"],
                 head=config["attention_head_dim"], joint=config["joint_attention_dim"],
                 pooled=config["pooled_projection_dim"], guided=config["guidance_embeds"])
        shapes = original(m)
        # The values of a row say where it is from.
        marked, names = {}, list(shapes)
        for at, (name, shape) in enumerate(shapes.items()):
            row = (at * 1000.0 + torch.arange(shape[0])).reshape([-1] + [1] * (len(shape) - 1))
            marked[name] = row.expand(shape).contiguous()
        places[variant] = {}
        for name, tensor in converter(m["heads"] * m["head"])(marked).items():
            numbers = tensor.reshape(tensor.shape[0], -1)[:, 0].long().tolist()
            runs = []
            for number in numbers:
                key, row = names[number // 1000], number % 1000
                if runs and runs[-1][0] == key and runs[-1][2] == row:
                    runs[-1][2] = row + 1
                else:
                    runs.append([key, row, row + 1])
            places[variant][name] = runs
    return places


def gguf_t5_names():
    """Of the pipelines' T5: what the `gguf` package calls its tensors."""
    folder = HERE.parent / "dev" / "pipeline" / "text_encoder_2"
    called = gguf.get_tensor_name_map(gguf.MODEL_ARCH.T5ENCODER, json.loads((folder / "config.json").read_text())["num_layers"])
    with safe_open(folder / "model.safetensors", "pt") as file:
        return {name: called.get_name(name, try_suffixes=(".weight",)) for name in sorted(file.keys())}


make("gguf", GGUF, {"mixed.gguf": write_gguf})
make("fp8", FP8, {"scaled.safetensors": scaled, "rows.safetensors": rows, "cast.safetensors": cast})
names = {"vae": original_vae_names(), "transformer": original_transformer_names(), "t5": gguf_t5_names()}
(HERE / "names.json").write_text(json.dumps(names, indent=0) + "\n")
