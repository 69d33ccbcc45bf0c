"""Makes the reference data of this folder and checks it.

Every model here is tiny and has random weights. The data were made on a CPU in
f32 with Python 3.11, torch 2.15, transformers 5.22.2, peft 0.21.2, gguf 0.19
and safetensors, all from PyPI.

    python generate.py                  remake every part
    python generate.py --only qwen2
    python generate.py --check          recompute everything from the stored files

The folder llama is given, not made here; `--check` recomputes it too. SOURCE.md
describes the layout of the files.
"""

import argparse
import copy
import json
import math
import os
import shutil
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import gguf
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.generation.logits_process import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

HERE = Path(__file__).parent
RANK = 4
ALPHA = 8
NEW_TOKENS = 16
# Of a router's choices; rounding to bf16 moves its logits by a hundredth of their spread.
LEAST_MARGIN = 0.06

COMMON = dict(vocab_size=160, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4)
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
ALL = ATTENTION + ["gate_proj", "up_proj", "down_proj"]
FUSED = ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]
SMALL = COMMON | dict(vocab_size=272, hidden_size=48, intermediate_size=80, num_attention_heads=3, num_key_value_heads=1, pad_token_id=0)


def longrope(original):
    """Phi-4-mini's: 12 of the 16 numbers of a head are turned, by factors for texts up to `original` tokens and beyond."""
    return dict(rope_type="longrope", rope_theta=10000.0, partial_rotary_factor=0.75,
                original_max_position_embeddings=original, short_factor=[1.0, 1.125, 1.25, 1.5, 1.5, 2.0],
                long_factor=[1.0, 1.5, 3.0, 6.5, 12.0, 20.25])


# Every branch once: tied and untied, biases, norms of heads, all scalings,
# heads that are wider than the model, keys that are shared by all queries,
# layers that are fused.
MODELS = {
    "llama3": dict(
        config=transformers.LlamaConfig(
            **COMMON, num_key_value_heads=1, tie_word_embeddings=True, attention_bias=True, mlp_bias=True,
            max_position_embeddings=256,
            rope_parameters=dict(rope_type="llama3", rope_theta=10000.0, factor=8.0, low_freq_factor=1.0,
                                 high_freq_factor=4.0, original_max_position_embeddings=64),
        ),
        targets=ALL, seed=1,
    ),
    "qwen2": dict(
        config=transformers.Qwen2Config(
            **COMMON, num_key_value_heads=2, tie_word_embeddings=True, max_position_embeddings=128,
            rope_parameters=dict(rope_type="linear", rope_theta=1000000.0, factor=2.0),
        ),
        targets=ATTENTION, seed=2, saves_adapter=True,
    ),
    "qwen3": dict(
        config=transformers.Qwen3Config(
            **COMMON, num_key_value_heads=2, head_dim=32, max_position_embeddings=128, rms_norm_eps=1e-6,
            rope_parameters=dict(rope_type="default", rope_theta=1000000.0),
        ),
        targets=ATTENTION, seed=3, is_dora=True,
    ),
    "phi3": dict(
        config=transformers.Phi3Config(**SMALL, max_position_embeddings=128), targets=FUSED, seed=4, saves_adapter=True,
    ),
    "phi4": dict(
        config=transformers.Phi3Config(
            **SMALL, max_position_embeddings=256, original_max_position_embeddings=64, tie_word_embeddings=True,
            rope_parameters=longrope(64),
        ),
        targets=FUSED, seed=5,
    ),
    # The same beyond the original context.
    "phi4_long": dict(
        config=transformers.Phi3Config(
            **SMALL, max_position_embeddings=256, original_max_position_embeddings=16, tie_word_embeddings=True,
            rope_parameters=longrope(16),
        ),
        targets=["qkv_proj"], seed=5,
    ),
    # Two of three layers see 8 tokens; heads are wider than the model, and q·k is scaled by something else.
    "gemma3": dict(
        config=transformers.Gemma3TextConfig(
            **SMALL | dict(num_hidden_layers=3), head_dim=32, max_position_embeddings=256, query_pre_attn_scalar=24,
            sliding_window=8, layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            rope_parameters=dict(
                sliding_attention=dict(rope_type="default", rope_theta=10000.0),
                full_attention=dict(rope_type="linear", rope_theta=1000000.0, factor=8.0),
            ),
        ),
        targets=ALL, seed=6, saves_adapter=True,
    ),
    "qwen3_moe": dict(
        config=transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, max_position_embeddings=128, rope_parameters=dict(rope_type="default", rope_theta=1e6),
            num_experts=8, num_experts_per_tok=2, moe_intermediate_size=24, norm_topk_prob=True,
        ),
        targets=ATTENTION, seed=8, saves_adapter=True,
    ),
    # The first layer has no experts; weights of the chosen ones are not divided by their sum.
    "qwen3_moe_mixed": dict(
        config=transformers.Qwen3MoeConfig(
            **SMALL, head_dim=16, max_position_embeddings=128, rope_parameters=dict(rope_type="default", rope_theta=1e6),
            num_experts=4, num_experts_per_tok=3, moe_intermediate_size=24, norm_topk_prob=False, mlp_only_layers=[0],
            tie_word_embeddings=True,
        ),
        targets=ATTENTION, seed=9,
    ),
    "mixtral": dict(
        config=transformers.MixtralConfig(
            **SMALL | dict(intermediate_size=32), head_dim=16, max_position_embeddings=128, sliding_window=None,
            rope_parameters=dict(rope_type="default", rope_theta=1e6), num_local_experts=4, num_experts_per_tok=2,
        ),
        targets=ATTENTION, seed=12,
    ),
}

# Gradients of the whole model that are kept, where it is trained whole.
OWN = ["model.embed_tokens.weight", "model.norm.weight", "model.layers.0.input_layernorm.weight",
       "model.layers.0.self_attn.q_proj.bias", "model.layers.1.mlp.down_proj.weight"]

PARTS = {".lora_A.default.weight": "A", ".lora_B.default.weight": "B",
         ".lora_magnitude_vector.default.weight": "M"}


def randomise(model, seed):
    """Matrices: N(0, 1/fan_in). The table: N(0, 1). Biases: N(0, 0.1^2). Norms: N(1, 0.1^2), Gemma's N(0, 0.1^2)."""
    gen = torch.Generator().manual_seed(seed)
    norm = 0 if model.config.model_type.startswith("gemma3") else 1
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            noise = torch.randn(*parameter.shape, generator=gen)
            if "embed_tokens" in name:
                parameter.copy_(noise / 4)
            elif parameter.dim() > 1:
                parameter.copy_(noise / math.sqrt(parameter.shape[1]))
            else:
                parameter.copy_(0.1 * noise if name.endswith("bias") else norm + 0.1 * noise)
    return model.eval()


def adapter_parameters(model):
    """`<module>.A`, `.B` and `.M` to the adapter's parameters."""
    found = {}
    for name, parameter in model.named_parameters():
        for suffix, part in PARTS.items():
            if name.endswith(suffix):
                found[f"{name.removesuffix(suffix).removeprefix('base_model.model.')}.{part}"] = parameter
    return found


def loss_of(model, ids):
    return model(input_ids=ids, labels=ids).loss


def adapted(model, targets, is_dora, given):
    """The model with an adapter of these values, or of random ones."""
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, use_dora=is_dora, task_type="CAUSAL_LM")
    model = get_peft_model(model, config).eval()
    gen = torch.Generator().manual_seed(9)
    with torch.no_grad():
        for name, parameter in adapter_parameters(model).items():
            if given:
                parameter.copy_(given[f"lora.{name}"])
            elif name.endswith(".M"):
                parameter.mul_(1 + 0.1 * torch.randn(*parameter.shape, generator=gen))
            else:
                parameter.copy_(torch.randn(*parameter.shape, generator=gen) / math.sqrt(parameter.shape[1]) / 2)
    return model


def greedy(model, ids):
    """What the model goes on with after the first sample, the likeliest token each time."""
    model.generation_config.update(do_sample=False, eos_token_id=None, pad_token_id=0)
    with torch.no_grad():
        mask = torch.ones_like(ids[:1])
        return model.generate(ids[:1], attention_mask=mask, max_new_tokens=NEW_TOKENS)[0, ids.shape[1]:]


def compute(model, ids, targets, is_dora, given, owns):
    """All that golden.safetensors holds, and the model with its adapter."""
    data = {"in.input_ids": ids, "greedy": greedy(model, ids)}
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
        data["out.logits"], data["out.hidden_states_last"] = out.logits, out.hidden_states[-1]
    if owns:
        model.zero_grad()
        loss_of(model, ids).backward()
        data |= {f"own_grad.{name}": p.grad for name, p in model.named_parameters() if name in OWN}
    model = adapted(model, targets, is_dora, given)
    with torch.no_grad():
        data["lora_out.logits"] = model(input_ids=ids).logits
    model.zero_grad()
    loss = loss_of(model, ids)
    loss.backward()
    data["loss"] = loss.detach().reshape(1)
    for name, parameter in adapter_parameters(model).items():
        data[f"lora.{name}"], data[f"grad.{name}"] = parameter.detach().clone(), parameter.grad
    return {name: tensor.detach().contiguous() for name, tensor in data.items()}, model


def least_margins(model, ids):
    """By how much routers prefer the last expert that they choose to the first that they do not, relative to the spread of
    their logits: the least of all routers, for every token. None where there are no experts."""
    margins = []

    def note(router, _, output):
        logits = output[0].reshape(*ids.shape, -1).sort(-1, descending=True).values
        margins.append((logits[..., router.top_k - 1] - logits[..., router.top_k]) / logits.std(-1))

    hooks = [module.register_forward_hook(note) for module in model.modules() if type(module).__name__.endswith("TopKRouter")]
    with torch.no_grad():
        model(input_ids=ids)
    for hook in hooks:
        hook.remove()
    return torch.stack(margins).amin(0) if margins else None


def tokens(model, made):
    """Random ones. Those whose experts rounding could change are replaced, from the first on, until there are none."""
    gen = torch.Generator().manual_seed(made["seed"])
    ids = torch.randint(0, 160, (2, 24), generator=gen)
    with_adapter = adapted(copy.deepcopy(model), made["targets"], made.get("is_dora", False), None)
    while True:
        found = [least_margins(model, ids), least_margins(with_adapter, ids)]
        if found[0] is None or torch.stack(found).min() > LEAST_MARGIN:
            return ids
        is_near = torch.stack(found).amin(0) <= LEAST_MARGIN
        for row in is_near.any(1).nonzero().flatten():
            ids[row, is_near[row].int().argmax()] = torch.randint(0, 160, (), generator=gen)


def make(name):
    made = MODELS[name]
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    model = randomise(AutoModelForCausalLM.from_config(made["config"]), made["seed"])
    model.save_pretrained(folder)
    is_dora = made.get("is_dora", False)
    data, model = compute(model, tokens(model, made), made["targets"], is_dora, None, name == "llama3")
    save_file(data, folder / "golden.safetensors", metadata={"class": made["config"].architectures[0]})
    if made.get("saves_adapter"):
        model.save_pretrained(folder / "peft")
        (folder / "peft/README.md").unlink(missing_ok=True)
    (folder / "generation_config.json").unlink(missing_ok=True)


def make_gemma3_vision():
    """The text model of gemma3 as a part of one with a vision tower, whose results with texts are the same."""
    text = AutoConfig.from_pretrained(HERE / "gemma3")
    vision = transformers.SiglipVisionConfig(hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                                             num_attention_heads=2, image_size=28, patch_size=14)
    config = transformers.Gemma3Config(text_config=text, vision_config=vision, mm_tokens_per_image=4,
                                       boi_token_index=3, eoi_token_index=4, image_token_index=5)
    model = randomise(transformers.Gemma3ForConditionalGeneration(config), 7)
    model.model.language_model.load_state_dict(AutoModelForCausalLM.from_pretrained(HERE / "gemma3").model.state_dict())
    golden = load_file(HERE / "gemma3/golden.safetensors")
    with torch.no_grad():
        logits = model(input_ids=golden["in.input_ids"]).logits
    assert apart({"x": golden["out.logits"]}, {"x": logits}) < 1e-6
    shutil.rmtree(HERE / "gemma3_vision", ignore_errors=True)
    model.save_pretrained(HERE / "gemma3_vision")
    (HERE / "gemma3_vision/generation_config.json").unlink(missing_ok=True)
    settings = json.loads((HERE / "gemma3_vision/config.json").read_text())
    # Where it was made.
    settings["text_config"].pop("_name_or_path", None)
    (HERE / "gemma3_vision/config.json").write_text(json.dumps(settings, indent=2, sort_keys=True) + "\n")


def permute(weight, n_heads):
    """Rows of queries and keys as llama.cpp's convert_hf_to_gguf.py stores those of Llama."""
    return weight.reshape(n_heads, 2, weight.shape[0] // n_heads // 2, *weight.shape[1:]).swapaxes(1, 2).reshape(weight.shape)


GGUF_NAMES = {
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm",
}


def gguf_name(name):
    stem, end = name.rsplit(".", 1)
    if not stem.startswith("model.layers."):
        return {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + "." + end
    _, _, index, rest = stem.split(".", 3)
    return f"blk.{index}.{GGUF_NAMES[rest]}.{end}"


def make_gguf(name):
    """The model of a folder as a GGUF file of several formats, and what transformers makes of it."""
    folder = HERE / name
    config, tensors = AutoConfig.from_pretrained(folder), load_file(folder / "model.safetensors")
    path = HERE / f"{name}.gguf"
    writer = gguf.GGUFWriter(path, config.model_type)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    if config.model_type == "qwen3":
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    else:
        writer.add_rope_dimension_count(config.head_dim)
    formats = [gguf.GGMLQuantizationType.Q8_0, gguf.GGMLQuantizationType.Q4_1, gguf.GGMLQuantizationType.F16]
    matrices = 0
    for key, tensor in sorted(tensors.items()):
        if config.model_type == "llama" and ".q_proj." in key:
            tensor = permute(tensor, config.num_attention_heads)
        if config.model_type == "llama" and ".k_proj." in key:
            tensor = permute(tensor, config.num_key_value_heads)
        format = gguf.GGMLQuantizationType.F32
        if tensor.dim() > 1:
            format = formats[matrices % len(formats)]
            matrices += 1
        data = gguf.quants.quantize(tensor.numpy(), format)
        writer.add_tensor(gguf_name(key), data, raw_dtype=format)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    save_file(gguf_results(name), HERE / f"{name}_gguf.safetensors")


def gguf_results(name):
    golden = load_file(HERE / name / "golden.safetensors")
    config = AutoConfig.from_pretrained(HERE, gguf_file=f"{name}.gguf")
    # The width of heads is in the file, but transformers does not look for it.
    config.head_dim = AutoConfig.from_pretrained(HERE / name).head_dim
    model = AutoModelForCausalLM.from_pretrained(
        HERE, gguf_file=f"{name}.gguf", config=config, dtype=torch.float32
    ).eval()
    ids = golden["in.input_ids"]
    with torch.no_grad():
        out = model(input_ids=ids, output_hidden_states=True)
    return {"in.input_ids": ids, "out.logits": out.logits, "out.hidden_states_last": out.hidden_states[-1]}


def apart(stored, again):
    assert stored.keys() == again.keys(), stored.keys() ^ again.keys()
    differences = [
        float((stored[name].double() - again[name].double()).abs().max() / stored[name].double().abs().max().clamp(min=1e-30))
        for name in stored
    ]
    return max(differences)


def check(name):
    folder = HERE / name
    stored = load_file(folder / "golden.safetensors")
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    modules = {key[5:-2].rsplit(".", 1)[1] for key in stored if key.startswith("lora.")}
    is_dora = any(key.endswith(".M") for key in stored)
    again, _ = compute(model, stored["in.input_ids"], sorted(modules), is_dora, stored, name == "llama3")
    again = {name: again[name] for name in stored}
    print(f"{name:12} {apart(stored, again):.1e}")
    if (folder / "peft").exists():
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        model = PeftModel.from_pretrained(model, folder / "peft").eval()
        with torch.no_grad():
            logits = model(input_ids=stored["in.input_ids"]).logits
        print(f"{name + '/peft':12} {apart({'x': stored['lora_out.logits']}, {'x': logits}):.1e}")


def sampling():
    """What is left of some logits by transformers' rules, and the share of each token."""
    logits = 3 * torch.randn(40, generator=torch.Generator().manual_seed(5))
    cases = []
    for temperature, top_k, top_p in [(1.0, None, 1.0), (0.7, 10, 1.0), (1.5, None, 0.8), (0.9, 12, 0.6), (2.0, 5, 0.1)]:
        rules = [TemperatureLogitsWarper(temperature)]
        rules += [TopKLogitsWarper(top_k)] if top_k else []
        rules += [TopPLogitsWarper(top_p)] if top_p < 1 else []
        scores = logits[None]
        for rule in rules:
            scores = rule(None, scores)
        shares = scores.softmax(-1)[0].tolist()
        cases.append(dict(temperature=temperature, top_k=top_k, top_p=top_p, shares=shares))
    return dict(logits=logits.tolist(), cases=cases)


GGUFS = ["llama", "qwen3"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--only", nargs="*")
    arguments = parser.parse_args()
    names = arguments.only or ["llama", *MODELS, "gemma3_vision", *(f"{name}.gguf" for name in GGUFS), "sampling"]
    for name in names:
        if name == "sampling":
            if not arguments.check:
                (HERE / "sampling.json").write_text(json.dumps(sampling(), indent=1) + "\n")
            print(f"{name:12} {'same' if json.loads((HERE / 'sampling.json').read_text()) == sampling() else 'differs'}")
            continue
        if name.endswith(".gguf"):
            stem = name.removesuffix(".gguf")
            if not arguments.check:
                make_gguf(stem)
            stored = load_file(HERE / f"{stem}_gguf.safetensors")
            print(f"{name:12} {apart(stored, gguf_results(stem)):.1e}")
            continue
        if name == "gemma3_vision":
            make_gemma3_vision()
            continue
        if name in MODELS and not arguments.check:
            make(name)
        check(name)


if __name__ == "__main__":
    main()
