"""Three small tokenizers and, in golden.json beside each, the ids that transformers gives for texts.

    pip install transformers sentencepiece protobuf
    python generate.py            compares the recorded ids with those of the installed transformers
    python generate.py --write    makes the tokenizers and the ids anew

    clip    256 bytes, the same at the end of a word, 150 merges; files as published with Stable
            Diffusion 3, and the tokenizer.json that transformers 5 saves of them
    clip_g  the same vocabulary, padded with "!", which thereby is a special token; files as
            published with Stable Diffusion XL, and a tokenizer.json as transformers 4 wrote it
    t5      171 pieces and 100 sentinels; the characters map is a small one of our own, since the
            real one alone takes 300 KB

Each entry of golden.json: the text, its ids padded and truncated to `length`, how many of them are
no padding, and how many did not fit. Recorded with transformers 5.22.2 and tokenizers 0.23.3.
"""
import json
import re
import sys
import tempfile
from collections import Counter
from pathlib import Path

from transformers import CLIPTokenizer, T5Tokenizer

folder = Path(__file__).parent
kinds = {"clip": (CLIPTokenizer, 77), "clip_g": (CLIPTokenizer, 77), "t5": (T5Tokenizer, 64)}

paragraph = """
A photo of an old lighthouse on a rocky shore at sunset, painted in warm colours. The keeper's dog
isn't afraid of the waves; it doesn't bark, it's waiting for the boat that they've promised. In the
foreground three children are flying a red kite, their mother's reading a letter, and somebody has
left a bicycle, a basket of oranges and an umbrella near the wooden fence. Soft light falls through
the clouds onto the water, the houses of the village look like toys, and the mountains behind them
are covered with snow. A detailed portrait of a young woman wearing a straw hat, standing in a field
of sunflowers, in the style of an oil painting from the nineteenth century, highly detailed, dramatic
lighting, shallow depth of field. A watercolour of a cat sleeping on the windowsill above a street
with trams, cafes and people who're walking in the rain with their dogs. I'll paint the second one
tomorrow, he'd said, and I'm sure that we're all going to see it at the exhibition in 2024.
"""

texts = [
    "", " ", "   ", "\t\n\r\n ", "a photo of a cat", "  leading and trailing  ", "two\tlines\nof text\r\nhere",
    "A PHOTO Of The LIGHTHOUSE", "ÉCOLE STRASSE İSTANBUL ΣΊΣΥΦΟΣ", "cat,dog;bird.", "wow!!! really???... (yes) [no] {x}",
    "!", "!!", "a!b", "hello ! world !!", "-- -- --", "#hashtag @name 50% $5 a_b a-b a/b",
    "it's isn't they've we're I'm I'll he'd 'tis rock'n'roll '", "IT'S THEY'VE I'LL", "it\u2019s they\u2019ve",
    "2024 10000 3.14 1,000 \u00bd \u00b2 \u2167 \u0663\u0664", "abc123def 4k 8x10",
    "caf\u00e9 na\u00efve \u00fcber \u00c5ngstr\u00f6m", "cafe\u0301 nai\u0308ve u\u0308ber A\u030angstro\u0308m",
    "\u1e9b\u0323 s\u0307\u0323 q\u0307\u0323", "\u732b\u306e\u5199\u771f\u3001\u6c34\u5f69", "\uace0\uc591\uc774 \u1100\u1161\u11a8", "\u043a\u043e\u0448\u043a\u0430 \u041d\u0410 \u043e\u043a\u043d\u0435",
    "\u0645\u0631\u062d\u0628\u0627 \u05e9\u05dc\u05d5\u05dd \u0939\u093f\u0928\u094d\u0926\u0940", "\u732bcat\u72ac dog", "\U0001f431 a cat \U0001f431\U0001f415", "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f44d\U0001f3fd \U0001f1e9\U0001f1ea \u2764\ufe0f",
    "&amp; &lt;b&gt; &#39; &quot;x&quot; &nbsp;", "<b>bold</b> <i>", "a\u0000b\u0001c\u0007d\u001be\u007ff", "a\u0085b\u00a0c\u2003d\u3000e\u200bf\u2060g\ufeffh\u00adi",
    "\u000b\u000c\u001c\u001d\u001e\u001f x", "\ufb01ne \uff26\uff35\uff2c\uff2c \u2460 \u210c \u00e6 \u00df \u017f", "\ufffd \ue000 \U0010ffff",
    "<|startoftext|> x <|endoftext|> y", "<|STARTOFTEXT|>a<|EndOfText|>b", "a<|StartOfText|>!b<|EndOfText|>!", "<|endoftext|", "</s> a <pad> b</s>c <unk> d", "<extra_id_0> x <extra_id_99>y<EXTRA_ID_1> <extra_id_100>",
    "x" * 300, "the lighthouse " * 40, " ".join(paragraph.split()), "!" * 100, "word. " * 31 + "\u732b" * 60, "a " * 62 + "a", "a " * 63 + "a", "a " * 74 + "a", "a " * 75 + "a",
]


def byte_symbols():
    """Every byte as a printable character, in the order of OpenAI's encoder: "!" is the first."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    symbols = {byte: chr(byte) for byte in plain} | {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [symbols[byte] for byte in plain + others]


def learn_merges(text, n):
    found = Counter(re.findall(r"'s|'t|'re|'ve|'m|'ll|'d|[a-z]+|[0-9]|[^\sa-z0-9]+", text.lower()))
    words = {tuple(word[:-1]) + (word[-1] + "</w>",): count for word, count in found.items()}
    merges = []
    for _ in range(n):
        pairs = Counter()
        for word, count in words.items():
            for pair in zip(word, word[1:]):
                pairs[pair] += count
        best = min(pairs, key=lambda pair: (-pairs[pair], pair))
        merges.append(best)
        words = {merged(word, best): count for word, count in words.items()}
    return merges


def merged(word, pair):
    out = []
    for symbol in word:
        if out and (out[-1], symbol) == pair:
            out[-1] += symbol
        else:
            out.append(symbol)
    return tuple(out)


def write(path, value):
    path.parent.mkdir(exist_ok=True)
    text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, indent=1) + "\n"
    path.write_text(text, encoding="utf-8", newline="\n")


def added(content, normalized, **others):
    return {"content": content, "lstrip": False, "normalized": normalized, "rstrip": False, "single_word": False, **others}


def make_clip(name, pad, config):
    symbols = byte_symbols()
    merges = learn_merges(paragraph, 150)
    tokens = symbols + [s + "</w>" for s in symbols] + [a + b for a, b in merges] + ["<|startoftext|>", "<|endoftext|>"]
    write(folder / name / "vocab.json", json.dumps({token: at for at, token in enumerate(tokens)}, ensure_ascii=False) + "\n")
    write(folder / name / "merges.txt", "#version: 0.2\n" + "".join(f"{a} {b}\n" for a, b in merges))
    start, end = added("<|startoftext|>", True), added("<|endoftext|>", True)
    write(folder / name / "special_tokens_map.json", {"bos_token": start, "eos_token": end, "pad_token": pad, "unk_token": end})
    common = {
        "add_prefix_space": False, "clean_up_tokenization_spaces": True, "do_lower_case": True, "errors": "replace",
        "model_max_length": 77, "pad_token": pad, "tokenizer_class": "CLIPTokenizer",
    }
    write(folder / name / "tokenizer_config.json", common | config(start, end, len(tokens)))
    (folder / name / "tokenizer.json").unlink(missing_ok=True)
    with tempfile.TemporaryDirectory() as saved:
        CLIPTokenizer.from_pretrained(folder / name).save_pretrained(saved)
        return json.loads((Path(saved) / "tokenizer.json").read_text("utf-8"))


def make_clip_l():
    def config(start, end, n):
        end = end | {"normalized": False}
        tokens = {str(n - 2): start | {"special": True}, str(n - 1): end | {"special": True}}
        return {"added_tokens_decoder": tokens, "bos_token": "<|startoftext|>", "eos_token": "<|endoftext|>", "unk_token": "<|endoftext|>"}

    write(folder / "clip" / "tokenizer.json", make_clip("clip", "<|endoftext|>", config))


def make_clip_g():
    def config(start, end, _):
        start, end = ({"__type": "AddedToken", **token} for token in (start, end))
        return {"bos_token": start, "eos_token": end, "unk_token": end}

    file = make_clip("clip_g", "!", config)
    file["model"]["merges"] = [" ".join(merge) for merge in file["model"]["merges"]]
    del file["model"]["type"]
    split = r"""'s|'t|'re|'ve|'m|'ll|'d|[\p{L}]+|[\p{N}]|[^\s\p{L}\p{N}]+"""
    file["pre_tokenizer"]["pretokenizers"][0]["pattern"]["Regex"] = split
    write(folder / "clip_g" / "tokenizer.json", file)


def make_t5():
    import sentencepiece

    with tempfile.TemporaryDirectory() as made:
        made = Path(made)
        rules = [(chr(c), " ") for c in (9, 10, 13, 0xA0, 0x2003, 0x3000, 0x200B)]
        rules += [(chr(c), "") for c in (1, 7, 0x1B, 0x7F, 0xAD)]
        rules += [(chr(0xFEE0 + c), chr(c)) for c in range(0x21, 0x7F)]
        rules += [("ﬁ", "fi"), ("²", "2"), ("½", "1⁄2"), ("①", "1"), ("ℌ", "H"), ("ſ", "s")]
        rules += [("e\u0301", "é"), ("i\u0308", "ï"), ("u\u0308", "ü"), ("o\u0308", "ö"), ("A\u030a", "Å")]
        line = "{}\t{}\n".format
        codes = lambda text: " ".join(f"{ord(c):X}" for c in text)
        (made / "rules.tsv").write_text("".join(line(codes(a), codes(b)) for a, b in rules))
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(paragraph.strip().splitlines()), model_prefix=str(made / "spiece"), vocab_size=300,
            normalization_rule_tsv=str(made / "rules.tsv"), pad_id=0, eos_id=1, unk_id=2, bos_id=-1, num_threads=1,
            hard_vocab_limit=False, minloglevel=2)
        T5Tokenizer.from_pretrained(made).save_pretrained(made / "saved")
        for name in ("tokenizer.json", "tokenizer_config.json"):
            write(folder / "t5" / name, json.loads((made / "saved" / name).read_text("utf-8")))


def ids(name):
    kind, length = kinds[name]
    tokenizer = kind.from_pretrained(folder / name)
    for text in texts:
        found = tokenizer(text, padding="max_length", truncation=True, max_length=length)
        whole = len(tokenizer(text)["input_ids"])
        yield {"text": text, "ids": found["input_ids"], "n_tokens": sum(found["attention_mask"]), "dropped": max(whole - length, 0)}


if "--write" in sys.argv:
    make_clip_l(), make_clip_g(), make_t5()
for name, (_, length) in kinds.items():
    now = {"length": length, "texts": list(ids(name))}
    if "--write" in sys.argv:
        rows = ",\n".join(json.dumps(text) for text in now["texts"])
        write(folder / name / "golden.json", f'{{"length": {length}, "texts": [\n{rows}\n]}}\n')
    recorded = json.loads((folder / name / "golden.json").read_text("utf-8"))
    wrong = [a["text"] for a, b in zip(recorded["texts"], now["texts"]) if a != b]
    print(name, "as recorded" if recorded == now else f"differs: {wrong}")
