"""Makes tiny models with tokenizers of every kind that GGUF files are written for, and proves the files.

    python generate.py                     makes the folders
    python generate.py --only NAME         makes one of them
    python generate.py --prove PROGRAM     writes GGUF files by `PROGRAM convert` and compares

Made with Python 3.11, torch 2.15, transformers 5.22.2, tokenizers 0.23.3 and safetensors from PyPI, with
fixed seeds. The proof also needs gguf 0.19.0 and llama-cpp-python 0.3.36: every file must be read by the
`gguf` package, give the logits of transformers in llama.cpp and in transformers itself, and llama.cpp's
tokenizer must give the ids of `tokenizers`. Files in a mix must have the formats that llama.cpp's quantiser gives each
tensor, no larger errors, and the logits of its file. A file that becomes a folder again must give the same logits.

NAME/config.json, model.safetensors (bf16), tokenizer.json, tokenizer_config.json   the models
expected.json   for each, what GGUF calls its tensors by the `gguf` package, and ids of TEXT
"""

import argparse
import json
import shutil
import subprocess
import tempfile
from pathlib import Path
from unittest import mock

import gguf
import torch
import transformers
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

HERE = Path(__file__).parent
TEXT = "The fire in the hearth burnt low; it's 1234 o'clock!\n\n  Größe, naïve, 日本."
CORPUS = [TEXT, "the fire burns in the hearth and the other hearths", "it is low and slow, it's so"] * 3

LLAMA_3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
           r"|\s*[\r\n]+|\s+(?!\S)|\s+")
QWEN_2 = LLAMA_3.replace("{1,3}", "")

SIZES = dict(hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
             num_key_value_heads=2, max_position_embeddings=256, torch_dtype="bfloat16")


def byte_pairs(split):
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = split
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=["<|end|>", "<|begin|>"], show_progress=False,
                                  initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    tokenizer.train_from_iterator(CORPUS, trainer)
    return tokenizer


def by(pattern):
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"),
                                    pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])


def gpt_2():
    return byte_pairs(pre_tokenizers.ByteLevel(add_prefix_space=False))


def smollm():
    return byte_pairs(pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True),
                                               pre_tokenizers.ByteLevel(add_prefix_space=False)]))


def llama_3():
    tokenizer = byte_pairs(by(LLAMA_3))
    tokenizer.post_processor = processors.TemplateProcessing(single="<|begin|> $A", special_tokens=[("<|begin|>", 1)])
    return tokenizer


def qwen_2():
    tokenizer = byte_pairs(by(QWEN_2))
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.add_tokens([AddedToken("<tool>", normalized=False)])
    return tokenizer


def sentence_pieces():
    alphabet = sorted({letter for text in CORPUS for letter in text if letter.isalpha() and letter.isascii()} | {"▁"})
    tokens = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + alphabet
    merges = [("▁", "t"), ("h", "e"), ("▁t", "he"), ("i", "n"), ("i", "r"), ("a", "r"), ("e", "ar"), ("▁", "f"),
              ("o", "w"), ("l", "ow")]
    tokens += [a + b for a, b in merges]
    vocabulary = {token: id for id, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocabulary, merges, unk_token="<unk>", byte_fallback=True, fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(),
                                           decoders.Strip(" ", 1, 0)])
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return tokenizer


def rope(kind="default", theta=10000.0, **more):
    return dict(rope_parameters=dict(rope_type=kind, rope_theta=theta, **more))


# Each with rows of the vocabulary that have no token, as Qwen's models have.
MODELS = {
    "llama": (transformers.LlamaConfig, gpt_2, rope()),
    "smollm": (transformers.LlamaConfig, smollm, dict(tie_word_embeddings=True, **rope("linear", factor=2.0))),
    "llama3": (transformers.LlamaConfig, llama_3,
               rope("llama3", 500000.0, factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                    original_max_position_embeddings=8192)),
    # Not called by its family: the loader of transformers takes a name with that word for another format.
    "pieces": (transformers.MistralConfig, sentence_pieces, dict(sliding_window=None, **rope())),
    "qwen2": (transformers.Qwen2Config, qwen_2, dict(tie_word_embeddings=True, **rope())),
    "qwen3": (transformers.Qwen3Config, qwen_2, dict(head_dim=16, **rope())),
    "phi3": (transformers.Phi3Config, sentence_pieces,
             dict(pad_token_id=0, sliding_window=100, original_max_position_embeddings=64,
                  **rope("longrope", short_factor=[1.0, 1.25, 1.5], long_factor=[1.0, 2.5, 6.0],
                         partial_rotary_factor=0.75, original_max_position_embeddings=64))),
}
ARCHITECTURES = {"qwen2": gguf.MODEL_ARCH.QWEN2, "qwen3": gguf.MODEL_ARCH.QWEN3, "phi3": gguf.MODEL_ARCH.PHI3}
PIECES = ["pieces", "phi3"]
ROPE_FACTORS = {"rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight"}


def make(name, seed):
    family, tokenizer, more = MODELS[name]
    tokenizer = tokenizer()
    ends = dict(bos_token_id=1, eos_token_id=2) if name in PIECES else dict(bos_token_id=1, eos_token_id=0)
    config = family(vocab_size=(tokenizer.get_vocab_size() // 32 + 1) * 32, **SIZES, **ends, **more)
    torch.manual_seed(seed)
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for key, parameter in sorted(model.named_parameters()):
            deviation = 0.2 if parameter.ndim == 2 else 0.1
            parameter.normal_(1.0 if "norm" in key else 0.0, 1.0 if "embed" in key else deviation)
    folder = HERE / name
    model.to(torch.bfloat16).save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    special = dict(bos_token="<s>", eos_token="</s>") if name in PIECES else \
        dict(bos_token="<|begin|>", eos_token="<|end|>")
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", clean_up_tokenization_spaces=False, **special)
    if name == "qwen2":
        settings["chat_template"] = "{% for m in messages %}{{ m.content }}<|end|>{% endfor %}"
    (folder / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")
    names = gguf.get_tensor_name_map(ARCHITECTURES.get(name, gguf.MODEL_ARCH.LLAMA), config.num_hidden_layers)
    called = {key: names.get_name(key, try_suffixes=(".weight", ".bias")) for key in model.state_dict()}
    if config.tie_word_embeddings:
        called.pop("lm_head.weight", None)
    return dict(tensors=called, ids=tokenizer.encode(TEXT).ids)


def greedy(logits, ids, n=12):
    ids, rows = list(ids), []
    for _ in range(n):
        rows.append(logits(ids))
        ids.append(int(rows[-1].argmax()))
    return ids, torch.stack(rows)


def open_llama(path):
    import llama_cpp

    inner = llama_cpp.llama_cpp
    defaults = inner.llama_model_default_params()
    # Its kernels for matrix units fail on some virtual machines.
    defaults.use_extra_bufts = False
    with mock.patch.object(inner, "llama_model_default_params", lambda: defaults):
        return llama_cpp.Llama(str(path), n_ctx=256, logits_all=True, verbose=False)


def prove(program, name, format, allowed):
    folder = HERE / name
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(TEXT).ids
    of = lambda model: lambda ids: model(torch.tensor([ids])).logits[0, -1]
    with torch.no_grad(), tempfile.TemporaryDirectory() as out:
        path = Path(out) / "model.gguf"
        subprocess.run([program, "convert", folder, "--out", path, "--dtype", format], check=True,
                       stdout=subprocess.DEVNULL)
        reader = gguf.GGUFReader(path)
        called = set(json.loads((HERE / "expected.json").read_text())[name]["tensors"].values())
        assert {tensor.name for tensor in reader.tensors} - ROPE_FACTORS == called
        llama = open_llama(path)
        found = llama.tokenize(TEXT.encode(), add_bos=True, special=True)
        assert found == ids, f"{name}: ids {found}, expected {ids}"

        def of_llama(ids):
            llama.reset()
            llama.eval(ids)
            return torch.tensor(llama.scores[len(ids) - 1][:reference.config.vocab_size])

        expected, rows = greedy(of(reference), ids)
        got, llama_rows = greedy(of_llama, ids)
        off = ((rows - llama_rows).abs().max() / rows.abs().max()).item() if got == expected else float("nan")
        first = ((rows[0] - llama_rows[0]).abs().max() / rows[0].abs().max()).item()
        # Its loader passes over the scaling of positions, and takes Qwen3's heads to be 128 wide.
        is_read = reference.config.rope_parameters["rope_type"] == "default" and name != "qwen3"
        apart = 0.0
        if is_read:
            again = transformers.AutoModelForCausalLM.from_pretrained(out, gguf_file="model.gguf", dtype=torch.float32)
            apart = ((of(again)(ids) - rows[0]).abs().max() / rows[0].abs().max()).item()
        print(f"{name:8} {format:5} llama.cpp {first:.1e} (all {off:.1e}), same continuation: {got == expected}, "
              f"transformers {f'{apart:.1e}' if is_read else 'does not read it'}")
        assert first < allowed and apart < allowed


# By llama.cpp's numbers.
MIXES = {"q4_k_s": 14, "q4_k_m": 15, "q5_k_s": 16, "q5_k_m": 17, "q6_k": 18}


def wide_model(folder):
    """A random model whose rows are whole blocks of 256, with the tokenizer of `llama3`."""
    config = transformers.LlamaConfig.from_pretrained(HERE / "llama3", hidden_size=512, intermediate_size=768,
                                                      num_hidden_layers=9, num_attention_heads=8)
    torch.manual_seed(9)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    for name in ["tokenizer.json", "tokenizer_config.json"]:
        shutil.copy(HERE / "llama3" / name, folder)


def values_of(path):
    tensors = gguf.GGUFReader(path).tensors
    return {tensor.name: (tensor.tensor_type, gguf.dequantize(tensor.data, tensor.tensor_type)) for tensor in tensors}


def prove_mix(program, mix):
    """Against llama.cpp's own quantiser: formats, errors of every tensor, and logits in llama.cpp."""
    import llama_cpp

    inner = llama_cpp.llama_cpp
    with tempfile.TemporaryDirectory() as place:
        place = Path(place)
        plain, ours, theirs = [place / f"{name}.gguf" for name in ["plain", "ours", "theirs"]]
        wide_model(place / "model")
        for path, format in [(plain, "f32"), (ours, mix)]:
            subprocess.run([program, "convert", place / "model", "--out", path, "--dtype", format], check=True,
                           stdout=subprocess.DEVNULL)
        settings = inner.llama_model_quantize_default_params()
        settings.ftype = MIXES[mix]
        assert inner.llama_model_quantize(str(plain).encode(), str(theirs).encode(), settings) == 0
        exact, found, expected = map(values_of, [plain, ours, theirs])
        assert set(found) == set(expected)
        worst, n_equal = 0.0, 0
        for name, (format, values) in expected.items():
            assert found[name][0] == format, f"{name}: {found[name][0]}, expected {format}"
            n_equal += int((found[name][1] == values).all())
            error = lambda it: float(((it - exact[name][1]) ** 2).mean() ** 0.5)
            if error(values):
                worst = max(worst, error(found[name][1]) / error(values))
        logits = []
        for path in [plain, ours, theirs]:
            llama = open_llama(path)
            llama.eval([1, 5, 9, 33, 17, 40, 8, 21])
            logits.append(torch.tensor(llama.scores[7]))
        apart = lambda a, b: ((a - b).abs().max() / b.abs().max()).item()
        print(f"{mix}: {n_equal} of {len(expected)} tensors equal, errors at most {worst:.4f} of llama.cpp's, logits "
              f"{apart(logits[1], logits[2]):.1e} from its file and {apart(logits[1], logits[0]):.1e} from f32")
        assert worst <= 1.02 and apart(logits[1], logits[2]) < 1e-3


def prove_folder(program, name):
    """A GGUF file as a folder again: transformers finds the logits of the original, and the ids."""
    with torch.no_grad(), tempfile.TemporaryDirectory() as place:
        path, folder = Path(place) / "model.gguf", Path(place) / "model"
        for source, out in [(HERE / name, path), (path, folder)]:
            more = ["--dtype", "f32"] if source != path else []
            subprocess.run([program, "convert", source, "--out", out, *more], check=True, stdout=subprocess.DEVNULL)
        ids = transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids
        assert ids == json.loads((HERE / "expected.json").read_text())[name]["ids"], (name, ids)
        found, expected = [transformers.AutoModelForCausalLM.from_pretrained(it, dtype=torch.float32)(
            torch.tensor([ids])).logits for it in [folder, HERE / name]]
        off = ((found - expected).abs().max() / expected.abs().max()).item()
        print(f"{name}: as a folder again {off:.1e}")
        assert off < 1e-6


def main():
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--prove", metavar="PROGRAM")
    arguments.add_argument("--only", metavar="NAME")
    arguments = arguments.parse_args()
    program = arguments.prove
    if not program:
        expected = json.loads((HERE / "expected.json").read_text()) if arguments.only else {}
        expected |= {name: make(name, seed) for seed, name in enumerate(MODELS) if arguments.only in (None, name)}
        (HERE / "expected.json").write_text(json.dumps(expected, indent=1, ensure_ascii=False) + "\n")
        return
    # llama.cpp keeps keys and values in f16, and rounds what meets a matrix to the matrix's format.
    for name in MODELS:
        for format, allowed in [("f32", 2e-3), ("f16", 5e-3), ("bf16", 1e-2), ("q8_0", 5e-2)]:
            prove(program, name, format, allowed)
        prove_folder(program, name)
    for mix in MIXES:
        prove_mix(program, mix)


main()
