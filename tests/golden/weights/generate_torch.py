"""Writes the PyTorch archives the reader is tested with, and what PyTorch itself says they hold.

Run with PyTorch installed (the files here are by 2.15.0):  python generate_torch.py
The hostile files are put together byte by byte; nothing here loads or runs them.
"""

import json
import pathlib
import zipfile

import torch

HERE = pathlib.Path(__file__).parent

# The names safetensors gives PyTorch's number formats.
DTYPES = {
    torch.bool: "BOOL",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.int16: "I16",
    torch.int32: "I32",
    torch.int64: "I64",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float32: "F32",
    torch.float64: "F64",
    torch.complex64: "C64",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e8m0fnu: "F8_E8M0",
    torch.uint16: "U16",
    torch.uint32: "U32",
    torch.uint64: "U64",
}


def random_bytes(*shape):
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def every_dtype():
    """One 3 by 4 tensor per format; any bit pattern is a number, but for bool."""
    tensors = {}
    for dtype, name in DTYPES.items():
        if dtype == torch.bool:
            tensors[f"dtype.{name}"] = torch.randint(0, 2, (3, 4), dtype=torch.bool)
        else:
            tensors[f"dtype.{name}"] = random_bytes(3, 4 * dtype.itemsize).view(dtype)
    return tensors


def state_dict():
    tensors = torch.nn.Linear(4, 2).state_dict()  # Carries `_metadata`, as a model's does.
    tensors.update(every_dtype())
    base = torch.arange(24, dtype=torch.float32).reshape(4, 6)
    tensors["scalar"] = torch.tensor(0.5)
    tensors["empty"] = torch.zeros(0, 5)
    tensors["base"] = base
    tensors["transposed"] = base.t()
    tensors["slice"] = base[1:3, 2:5]
    tensors["columns"] = base[:, ::2]
    tensors["permuted"] = torch.arange(24, dtype=torch.int16).reshape(2, 3, 4).permute(2, 0, 1)
    tensors["expanded"] = torch.arange(3, dtype=torch.int32).expand(4, 3)
    tensors["one_row"] = torch.arange(5, dtype=torch.int64).as_strided((1, 5), (99, 1))
    tensors["transposed_fp8"] = random_bytes(2, 3).view(torch.float8_e4m3fn).t()
    tensors["parameter"] = torch.nn.Parameter(torch.randn(2, 2))
    marked = torch.nn.Parameter(torch.randn(3))
    marked.note = "kept"  # Makes PyTorch write the parameter with its state.
    tensors["parameter_with_state"] = marked
    tensors["tied"] = tensors["parameter"]
    tensors["größe.重み"] = torch.randn(2)
    return tensors


def checkpoint():
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.Linear(2, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    model(torch.randn(5, 3)).sum().backward()
    optimizer.step()
    return {
        "state_dict": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "seen": 5_000_000_000,
        "loss": 0.125,
        "note": "größer",
        "best": True,
        "scheduler": None,
        "dtype": torch.bfloat16,
        "device": torch.device("cpu"),
        "size": torch.Size([2, 3]),
        "history": [0.5, -1, {"step": 7}],
    }


def tensors_in(value, name):
    """The tensors of a nested value under their joined names."""
    if isinstance(value, torch.Tensor):
        yield name or "tensor", value
    elif isinstance(value, (dict, list, tuple)):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for key, inner in items:
            yield from tensors_in(inner, f"{name}.{key}" if name else str(key))


def described(tensor):
    dense = tensor.detach().contiguous().reshape(-1)
    assert dense.numel() <= 64
    return {
        "dtype": DTYPES[tensor.dtype],
        "shape": list(tensor.shape),
        "hex": bytes(dense.view(torch.uint8).tolist()).hex(),
    }


def write_hostile(file, module, name, argument):
    """A pickle that calls `module.name(argument)` when loaded by Python."""
    text = argument.encode()
    pickle = b"\x80\x02c" + f"{module}\n{name}\n".encode()
    pickle += b"X" + len(text).to_bytes(4, "little") + text + b"\x85R."
    with zipfile.ZipFile(HERE / file, "w", zipfile.ZIP_STORED) as archive:
        for entry, content in [("data.pkl", pickle), ("byteorder", b"little"), ("version", b"3\n")]:
            info = zipfile.ZipInfo(f"{file.removesuffix('.pt')}/{entry}")
            archive.writestr(info, content)


def main():
    torch.manual_seed(20)
    expected = {}
    for file, value, protocol in [
        ("state_dict.pt", state_dict(), 2),  # What torch.save takes unless told otherwise.
        ("checkpoint.pt", checkpoint(), 2),
        ("protocol5.pt", {"step": 2**40, **every_dtype()}, 5),
        ("tensor.pt", torch.randn(2, 3), 2),
    ]:
        torch.save(value, HERE / file, pickle_protocol=protocol)
        # What counts is what PyTorch reads back, not what we meant to write.
        # Its careful loader knows protocol 2 only; the other file we made ourselves just now.
        loaded = torch.load(HERE / file, weights_only=protocol == 2)
        expected[file] = {name: described(tensor) for name, tensor in tensors_in(loaded, "")}
    text = json.dumps(expected, indent=1, ensure_ascii=False)
    (HERE / "torch.expected.json").write_text(text + "\n", encoding="utf-8")
    # Without tensors: that format names their storages by addresses, new ones in every run.
    torch.save({"epoch": 3}, HERE / "legacy.pt", _use_new_zipfile_serialization=False)
    torch.save(torch.ones(2, dtype=torch.complex64).conj(), HERE / "conjugated.pt")
    write_hostile("hostile_system.pt", "os", "system", "echo hostile")
    write_hostile("hostile_eval.pt", "builtins", "eval", "1 + 1")


if __name__ == "__main__":
    main()
