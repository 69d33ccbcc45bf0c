"""Loads all tensors of a safetensors file with a peer of hearth's loader and says how long it took."""
import json, sys, time

reader, path = sys.argv[1:3]
import torch  # noqa: F401  (imported before the clock starts)

if reader == "python-safetensors":
    from safetensors import safe_open

    begun = time.perf_counter()
    with safe_open(path, framework="pt") as file:
        # Without the clone the tensors are a mapping that nothing has read yet.
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}
elif reader == "fastsafetensors":
    from fastsafetensors import fastsafe_open

    begun = time.perf_counter()
    with fastsafe_open(filenames=[path], nogds=True, device="cpu", debug_log=False) as file:
        tensors = {name: file.get_tensor(name).clone().detach() for name in file.keys()}
else:
    sys.exit(f"no reader {reader}")
secs = time.perf_counter() - begun
size = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
peak = next(int(line.split()[1]) * 1024 for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({"secs": secs, "bytes": size, "rss_peak_bytes": peak}))
