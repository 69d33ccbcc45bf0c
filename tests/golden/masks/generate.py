"""The masked loss of two samples and its gradient, by PyTorch: masks are scaled to latents as kohya scales them (area), and
clamped as OneTrainer clamps them (unmasked_weight). Run with torch 2 and safetensors; writes golden.safetensors."""

import pathlib

import torch
import torch.nn.functional as F
from safetensors.torch import save_file

SAMPLES, CHANNELS, HEIGHT, WIDTH, SCALE = 2, 4, 6, 8, 8
UNMASKED_WEIGHT = 0.1

generator = torch.Generator().manual_seed(7)
shape = (SAMPLES, CHANNELS, HEIGHT, WIDTH)
prediction = torch.randn(shape, generator=generator).requires_grad_()
target = torch.randn(shape, generator=generator)
weights = torch.tensor([0.5, 3.0])

# A disc with a soft edge, and a stripe.
rows, columns = torch.meshgrid(
    torch.arange(HEIGHT * SCALE).float(), torch.arange(WIDTH * SCALE).float(), indexing="ij"
)
disc = (30 - ((rows - 20) ** 2 + (columns - 25) ** 2).sqrt()).mul(25).clamp(0, 255)
stripe = ((columns > 13) & (columns < 41)).float() * 200
pixels = torch.stack([disc, stripe]).round()

mask = F.interpolate(pixels[:, None] / 255, size=(HEIGHT, WIDTH), mode="area")
factors = mask.clamp(UNMASKED_WEIGHT, 1)
losses = F.mse_loss(prediction, target, reduction="none") * factors
loss = (losses.mean([1, 2, 3]) * weights).mean()
loss.backward()

tensors = {
    "in.prediction": prediction.detach(),
    "in.target": target,
    "in.weights": weights,
    "in.pixels": pixels,
    "out.mask": mask[:, 0],
    "out.loss": loss.detach().reshape(1),
    "out.gradient": prediction.grad,
}
path = pathlib.Path(__file__).parent / "golden.safetensors"
save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)
