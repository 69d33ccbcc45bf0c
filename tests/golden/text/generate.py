"""Small tokenizers of the kinds that language models have, and what the reference makes of texts and
conversations with them.

    pip install transformers tokenizers gguf sentencepiece
    python generate.py

    bpe/          byte pairs split as SmolLM2 does: tokenizer.json and tokenizer_config.json
    bpe.gguf      the same vocabulary as llama.cpp keeps it
    pieces.gguf   SentencePiece's pairs with bytes for what has none, as llama.cpp keeps Llama 2's
    golden.json   texts with their ids, by both; conversations with their text, ids and mask of
                  answers, by several templates

Recorded with transformers 5.22.2, tokenizers 0.23.3, sentencepiece 0.2.2 and gguf 0.19.0.
"""
import json
import tempfile
from pathlib import Path

import gguf
import sentencepiece
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

folder = Path(__file__).parent

paragraph = """
A model that reads letters one by one learns slowly, and so words are cut into pieces that come often.
The pieces of this file were found in these very lines: the longer the text, the better the pieces.
What is asked? "How many pieces are there?" - There're 300, and 256 of them are single bytes. In 2024
somebody counted them twice, it isn't hard; we've done it, I'm sure they'll do it, he'd said so.

    def answer(question):
        return question.strip() + "!"

An assistant answers what a user asks, and the system says how it should do so. The answer is short.
"""

texts = [
    "",
    "a",
    " a  b   c ",
    "The pieces of this text were found elsewhere.",
    "They'll say: isn't it 2024? We've 1234567 reasons, HE'D said!",
    "line\nline\n\nline\r\n\ttab  \n  two",
    "def answer(x):\n    return x\n",
    "naïve café, Zürich — 東京 🦊 \u200d e\u0301",
    "a<|im_start|>b<|endoftext|>c",
    "...!!!???   ...\n\n\n",
]

chats = [
    [("user", "How many pieces?"), ("assistant", "There are 300.")],
    [("system", "Be short."), ("user", " Who? "), ("assistant", " It's me.\n"), ("user", "And you?"),
     ("assistant", "東京 🦊")],
    [("user", "a"), ("assistant", "b"), ("user", "c\n\nd"), ("assistant", "e <|im_end|> f")],
]

# Each marks answers for transformers; without the marks they mean the same.
templates = {
    "chatml": "{% for message in messages %}"
    "{% if loop.first and messages[0]['role'] != 'system' %}"
    "{{ '<|im_start|>system\\nYou answer.<|im_end|>\\n' }}{% endif %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' }}"
    "{% if message['role'] == 'assistant' %}{% generation %}{{ message['content'] + '<|im_end|>' }}"
    "{% endgeneration %}{% else %}{{ message['content'] + '<|im_end|>' }}{% endif %}{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}",
    "headers": """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content'].strip() %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = "" %}
{%- endif %}
{%- if strftime_now is defined and false %}
    {%- set date = strftime_now("%d %b %Y") %}
{%- else %}
    {%- set date = "26 Jul 2024" %}
{%- endif %}
{{- "[system]\\n" + "Today: " + date + "\\n" + system + eos_token }}
{%- for message in messages %}
    {{- '[' + message['role'] + ']\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
        {{- message['content'] | trim + eos_token }}
        {%- endgeneration %}
    {%- else %}
        {{- message['content'] | trim + eos_token }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '[assistant]\\n' }}
{%- endif %}
""",
    "instruct": """{%- set ns = namespace(system='') -%}
{%- if messages[0]['role'] == 'system' -%}{%- set ns.system = messages[0]['content'] + '\\n\\n' -%}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] == 'user' -%}
{{ '[INST] ' + (ns.system if loop.index0 <= 1 else '') + message['content'].strip() + ' [/INST]' }}
{%- elif message['role'] == 'assistant' -%}
{%- generation -%}{{ ' ' + message['content'].strip() + eos_token }}{%- endgeneration -%}
{%- elif message['role'] != 'system' -%}{{ raise_exception('only user, assistant and system') }}
{%- endif -%}
{%- endfor -%}""",
}


def byte_pairs():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(paragraph.splitlines(keepends=True), trainer)
    fast = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<|im_start|>", eos_token="<|im_end|>", pad_token="<|im_end|>"
    )
    fast.chat_template = templates["chatml"]
    with tempfile.TemporaryDirectory() as saved:
        fast.save_pretrained(saved)
        (folder / "bpe").mkdir(exist_ok=True)
        for name in ["tokenizer.json", "tokenizer_config.json"]:
            (folder / "bpe" / name).write_bytes(Path(saved, name).read_bytes())
        config = json.loads((folder / "bpe" / "tokenizer_config.json").read_text())
        config["chat_template"] = templates["chatml"]
        (folder / "bpe" / "tokenizer_config.json").write_text(json.dumps(config, indent=2) + "\n")
    return fast


def write_gguf(path, kind, tokens, types, fill):
    writer = gguf.GGUFWriter(folder / path, "llama")
    writer.add_tokenizer_model(kind)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    fill(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def byte_pairs_gguf(fast):
    file = json.loads(fast.backend_tokenizer.to_str())
    vocab = file["model"]["vocab"]
    tokens = sorted(vocab, key=vocab.get)
    special = {token["content"] for token in file["added_tokens"]}
    types = [gguf.TokenType.CONTROL if token in special else gguf.TokenType.NORMAL for token in tokens]

    def fill(writer):
        writer.add_tokenizer_pre("smollm")
        writer.add_token_merges([" ".join(merge) for merge in file["model"]["merges"]])
        writer.add_bos_token_id(vocab["<|im_start|>"])
        writer.add_eos_token_id(vocab["<|im_end|>"])
        writer.add_chat_template(fast.chat_template)

    write_gguf("bpe.gguf", "gpt2", tokens, types, fill)


def pieces():
    with tempfile.TemporaryDirectory() as work:
        sentencepiece.SentencePieceTrainer.train(
            sentence_iterator=iter(paragraph.splitlines()), model_prefix=f"{work}/pieces", model_type="bpe",
            vocab_size=400, byte_fallback=True, character_coverage=1.0, normalization_rule_name="identity",
            remove_extra_whitespaces=False, add_dummy_prefix=True, split_digits=True, minloglevel=2,
        )
        processor = sentencepiece.SentencePieceProcessor(model_file=f"{work}/pieces.model")
    ids = range(processor.vocab_size())
    kind = lambda id: (
        gguf.TokenType.UNKNOWN if processor.is_unknown(id)
        else gguf.TokenType.CONTROL if processor.is_control(id)
        else gguf.TokenType.BYTE if processor.is_byte(id)
        else gguf.TokenType.NORMAL
    )

    def fill(writer):
        writer.add_token_scores([processor.get_score(id) for id in ids])
        writer.add_unk_token_id(processor.unk_id())
        writer.add_bos_token_id(processor.bos_id())
        writer.add_eos_token_id(processor.eos_id())

    write_gguf("pieces.gguf", "llama", [processor.id_to_piece(id) for id in ids], [kind(id) for id in ids], fill)
    return processor


def conversation(fast, name, chat):
    messages = [{"role": role, "content": content} for role, content in chat]
    made = fast.apply_chat_template(
        messages, chat_template=templates[name], tokenize=True, return_dict=True,
        return_assistant_tokens_mask=True,
    )
    text = fast.apply_chat_template(messages, chat_template=templates[name], tokenize=False)
    return {
        "template": name, "messages": messages, "text": text,
        "ids": list(made["input_ids"]), "mask": list(made["assistant_masks"]),
    }


fast = byte_pairs()
byte_pairs_gguf(fast)
processor = pieces()
golden = {
    "texts": [
        {"text": text, "bpe": fast.encode(text, add_special_tokens=False),
         # What stands for itself in one vocabulary is text in the other.
         "pieces": processor.encode(text)}
        for text in texts
    ],
    "templates": {
        name: {"marked": text, "plain": text.replace("endgeneration", "endif").replace("generation %", "if true %")
               .replace("generation -%", "if true -%")}
        for name, text in templates.items()
    },
    "conversations": [conversation(fast, name, chat) for name in templates for chat in chats],
}
(folder / "golden.json").write_text(json.dumps(golden, indent=1, ensure_ascii=False) + "\n")
