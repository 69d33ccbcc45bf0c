"""Adapters with random values, for the scripts `check_exports.py` of all families, and how far outputs are apart."""

import torch
from peft import LoraConfig

TOLERANCE = 1e-5


def apart(got, expected):
    return ((got - expected).abs().max() / expected.abs().max()).item()


def add_adapter(transformer, **settings):
    """Gives a transformer of diffusers an adapter; returns the generator of its values, for more of them."""
    transformer.add_adapter(LoraConfig(r=4, lora_alpha=6, **settings))
    gen = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for name, parameter in sorted(transformer.named_parameters()):
            if ".lora_magnitude" in name:
                parameter.mul_(1 + 0.2 * torch.randn(parameter.shape, generator=gen))
            elif ".lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=gen))
    return gen
