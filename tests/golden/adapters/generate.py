"""Adapters of two linear layers, and of norms between them, as LyCORIS and PEFT write them, with outputs and gradients.
See SOURCE.md.

    python generate.py

Writes, beside itself, a file or folder for each case and `expected.safetensors`.
"""

import json
import shutil
from pathlib import Path

import torch
from lycoris import create_lycoris
from lycoris.config import PRESET
from peft import LoHaConfig, LoKrConfig, LoraConfig, get_peft_model
from safetensors.torch import save_file
from torch import nn

HERE = Path(__file__).parent
ROWS = 5


class Model(nn.Module):
    """12 does not split evenly, 40 and 24 have several factors."""

    def __init__(self):
        super().__init__()
        self.first = nn.Linear(24, 40)
        self.second = nn.Linear(40, 12)

    def forward(self, x):
        return self.second(torch.nn.functional.silu(self.first(x)))


class RmsNorm(nn.Module):
    """Of the kind that LyCORIS trains: with a function for what comes before the weight."""

    def __init__(self, width):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def _norm(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)

    def forward(self, x):
        return self._norm(x) * self.weight


class NormedModel(Model):
    """With a norm of each kind."""

    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(40)
        self.rms = RmsNorm(40)

    def forward(self, x):
        return self.second(self.rms(torch.nn.functional.silu(self.norm(self.first(x)))))


def randomised(parameters, seed):
    generator = torch.Generator().manual_seed(seed)
    for parameter in parameters:
        with torch.no_grad():
            parameter.copy_(0.4 * torch.randn(parameter.shape, generator=generator))


def numbers(*shape, seed):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def base(kind=Model):
    model = kind()
    randomised(model.parameters(), 1)
    return model


def run(model, named):
    """Output, and gradients of the input and of an adapter's matrices, for a given gradient of the output."""
    x = numbers(ROWS, 24, seed=2).requires_grad_()
    y = model(x)
    y.backward(numbers(ROWS, 12, seed=3))
    found = {"out": y.detach(), "grad.x": x.grad}
    found |= {f"grad.{name}": parameter.grad for name, parameter in named.items()}
    return found


def lycoris(name, kind=Model, **settings):
    model = base(kind)
    model.requires_grad_(False)
    network = create_lycoris(model, 1.0, **settings)
    network.apply_to()
    trained = {name: p for name, p in network.named_parameters() if p.requires_grad}
    randomised(trained.values(), 4)
    found = run(model, trained)
    state = {key: value.detach().clone().contiguous() for key, value in network.state_dict().items()}
    state = {key: value for key, value in state.items() if "scalar" not in key}
    save_file(state, HERE / f"{name}.safetensors")
    return found


def peft(name, config):
    model = get_peft_model(base(), config)
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    randomised(trained.values(), 5)
    found = run(model, {key.replace(".default", ""): value for key, value in trained.items()})
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "README.md").unlink(missing_ok=True)
    config = json.loads((folder / "adapter_config.json").read_text())
    config["target_modules"] = sorted(config["target_modules"])
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2, sort_keys=True) + "\n")
    return found


def main():
    both = ["first", "second"]
    lycoris_cases = {
        "lycoris_loha": {"algo": "loha", "linear_dim": 3, "linear_alpha": 2.0},
        "lycoris_loha_rs": {"algo": "loha", "linear_dim": 3, "linear_alpha": 2.0, "rs_lora": True},
        "lycoris_lokr": {"algo": "lokr", "linear_dim": 2, "linear_alpha": 1.0, "factor": -1},
        "lycoris_lokr_four": {"algo": "lokr", "linear_dim": 2, "linear_alpha": 1.0, "factor": 4},
        "lycoris_lokr_both": {
            "algo": "lokr", "linear_dim": 1, "linear_alpha": 3.0, "factor": -1, "decompose_both": True,
        },
        "lycoris_lokr_full": {
            "algo": "lokr", "linear_dim": 10000, "linear_alpha": 1.0, "factor": 4, "full_matrix": True,
        },
        "lycoris_lora_rs": {"algo": "lora", "linear_dim": 4, "linear_alpha": 2.0, "rs_lora": True},
    }
    peft_cases = {
        "peft_loha": LoHaConfig(r=3, alpha=2, target_modules=both, init_weights=False),
        "peft_lokr": LoKrConfig(r=2, alpha=3, target_modules=both, init_weights=False, decompose_factor=4),
        "peft_lokr_both": LoKrConfig(
            r=1, alpha=3, target_modules=both, init_weights=False, decompose_both=True,
        ),
        "peft_lokr_full": LoKrConfig(
            r=16, alpha=4, target_modules=both, init_weights=False, rank_pattern={"second": 12},
        ),
        "peft_lora_rs": LoraConfig(r=4, lora_alpha=2, target_modules=both, use_rslora=True),
    }
    expected = {"x": numbers(ROWS, 24, seed=2), "grad.out": numbers(ROWS, 12, seed=3)}
    expected |= {f"base.{name}": p.detach() for name, p in base().named_parameters()}
    norms = {name: p for name, p in base(NormedModel).named_parameters() if "norm" in name or "rms" in name}
    expected |= {f"base.{name}": p.detach() for name, p in norms.items()}
    for name, settings in lycoris_cases.items():
        expected |= {f"{name}.{key}": value for key, value in lycoris(name, **settings).items()}
    PRESET["full"]["target_module"] = ["Linear", "LayerNorm", "RmsNorm"]
    settings = {"algo": "lora", "linear_dim": 2, "linear_alpha": 1.0, "train_norm": True}
    expected |= {f"lycoris_norm.{key}": value for key, value in lycoris("lycoris_norm", NormedModel, **settings).items()}
    for name, config in peft_cases.items():
        expected |= {f"{name}.{key}": value for key, value in peft(name, config).items()}
    save_file({key: value.contiguous() for key, value in expected.items()}, HERE / "expected.safetensors")


if __name__ == "__main__":
    main()
