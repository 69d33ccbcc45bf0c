"""Losses of a batch with their gradients, and what a loss has of the timestep, by the code of others:

- PyTorch: mse_loss, l1_loss, huber_loss, smooth_l1_loss
- kohya's sd-scripts: conditional_loss and get_huber_threshold_if_needed of library/train_util.py
- diffusers: compute_snr, with the loss of x that Min-SNR (arXiv 2303.09556) weights
- ai-toolkit: the weights of `linear_timesteps`, and which timesteps `content_or_style` draws
- SimpleTuner, as diffusers' train_text_to_image_sdxl.py: generate_timestep_weights

Run with torch 2, diffusers and safetensors, from a folder with sd-scripts' train_util.py, ai-toolkit's
toolkit/samplers/custom_flowmatch_sampler.py and toolkit/timestep_weighing, and SimpleTuner's custom_schedule.py; writes
golden.safetensors. Made with sd-scripts 48d368f, ai-toolkit 27a03a9 and SimpleTuner bc8e6ab."""

import ast
import math
import pathlib
import sys
import types
from typing import Optional

import torch
import torch.nn.functional as F
from diffusers.training_utils import compute_snr
from safetensors.torch import save_file


def functions(path, names):
    """Those functions of a file, without what the file imports."""
    tree = ast.parse(pathlib.Path(path).read_text())
    tree.body = [node for node in tree.body if getattr(node, "name", None) in names]
    scope = {"torch": torch, "math": math, "Optional": Optional, "argparse": types.SimpleNamespace(Namespace=object)}
    exec(compile(tree, path, "exec"), scope)
    return [scope[name] for name in names]


conditional_loss, huber_threshold = functions(
    "train_util.py", ["conditional_loss", "get_huber_threshold_if_needed"]
)
(timestep_weights,) = functions("custom_schedule.py", ["generate_timestep_weights"])
sys.path.insert(0, ".")
from toolkit.samplers.custom_flowmatch_sampler import CustomFlowMatchEulerDiscreteScheduler  # noqa: E402

tensors = {}
generator = torch.Generator().manual_seed(11)
shape = (3, 4, 6, 8)
target = torch.randn(shape, generator=generator)
# Errors from far below a threshold to far above it, on both sides.
errors = torch.randn(shape, generator=generator) * 10 ** (torch.rand(shape, generator=generator) * 4 - 3)
prediction = (target + errors).requires_grad_()
weights = torch.tensor([0.5, 3.0, 1.0])
factors = torch.rand((3, 1, 6, 8), generator=generator).expand(shape).contiguous()
timesteps = torch.tensor([120.0, 500.0, 930.0])
sigmas = timesteps / 1000
tensors |= {"in.prediction": prediction.detach(), "in.target": target, "in.weights": weights}
tensors |= {"in.factors": factors, "in.sigmas": sigmas}

# The flow's ratio of signal to noise, as kohya's and diffusers' code ask for it.
every = torch.arange(1, 1000) / 1000
cumulative = (1 - every) ** 2 / ((1 - every) ** 2 + every**2)
flow = types.SimpleNamespace(
    alphas_cumprod=torch.cat([torch.ones(1), cumulative]),
    config=types.SimpleNamespace(num_train_timesteps=1000),
)


def record(name, of):
    """The loss as all trainers take its mean: over a sample, times its weight, over the batch."""
    prediction.grad = None
    loss = ((of * factors).mean([1, 2, 3]) * weights).mean()
    loss.backward()
    tensors[f"out.{name}.loss"] = loss.detach().reshape(1)
    tensors[f"out.{name}.gradient"] = prediction.grad.clone()


record("mse", F.mse_loss(prediction, target, reduction="none"))
record("l1", F.l1_loss(prediction, target, reduction="none"))
record("huber", F.huber_loss(prediction, target, reduction="none", delta=0.3))
record("smooth_l1", F.smooth_l1_loss(prediction, target, reduction="none", beta=0.3))
for schedule in ["constant", "exponential", "snr"]:
    for kind, ours in [("huber", "pseudo_huber"), ("smooth_l1", "pseudo_smooth_l1")]:
        args = types.SimpleNamespace(loss_type=kind, huber_schedule=schedule, huber_c=0.3, huber_scale=1.0)
        c = huber_threshold(args, timesteps.long(), flow)
        tensors[f"out.threshold.{schedule}"] = c.clone()
        record(f"{ours}.{schedule}", conditional_loss(prediction, target, kind, "none", c))

# Min-SNR: the loss of x, which is z - sigma * v, weighted by min(SNR, gamma).
snr = compute_snr(flow, timesteps.long())
z = torch.randn(shape, generator=generator)
of_x = lambda v: z - sigmas[:, None, None, None] * v  # noqa: E731
clamped = torch.minimum(snr, torch.full_like(snr, 5.0))[:, None, None, None]
record("min_snr", clamped * (of_x(prediction) - of_x(target)) ** 2)
record("sigma_squared", (of_x(prediction) - of_x(target)) ** 2)

# Weights of all timesteps from 1000 down to 1.
scheduler = CustomFlowMatchEulerDiscreteScheduler()
tensors["out.bell"] = scheduler.linear_timesteps_weights
tensors["out.half_bell"] = scheduler.linear_timesteps_weights2

# How many of 1000 timesteps lie in each tenth, from least noise to most: counted over a fine grid of uniform draws.
uniform = (torch.arange(1_000_000, dtype=torch.float64) + 0.5) / 1_000_000


def share_of_tenths(sigmas):
    return torch.histc(sigmas, 10, 0.0, 1.0) / len(sigmas)


for name, index in [("content", uniform**3), ("style", 1 - uniform**3)]:
    # ai-toolkit: an index into timesteps sorted from most noise to least, here of its `linear` and `sigmoid`.
    tensors[f"out.{name}.uniform"] = share_of_tenths(1 - index)
    ordered = 1 - torch.special.ndtri(index).sigmoid()
    tensors[f"out.{name}.logit_normal"] = share_of_tenths(ordered)
for strategy in ["earlier", "later", "range"]:
    args = types.SimpleNamespace(
        timestep_bias_strategy=strategy,
        timestep_bias_portion=0.3,
        timestep_bias_multiplier=3.0 if strategy != "range" else 0.25,
        timestep_bias_begin=200,
        timestep_bias_end=500,
    )
    tensors[f"out.{strategy}"] = timestep_weights(args, 1000).reshape(10, 100).sum(1)

path = pathlib.Path(__file__).parent / "golden.safetensors"
save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, path)
for name, tensor in tensors.items():
    print(name, tuple(tensor.shape), tensor.flatten()[:4].tolist())
