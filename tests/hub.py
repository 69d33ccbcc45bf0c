"""`hearth fetch` and Python's huggingface_hub share one cache: each reads what the other wrote.

usage: hub.py HEARTH

Serves a tiny model by the hub's interface on this computer, lets both download it, also at the same time and after
kills, and loads the result by diffusers. Needs huggingface_hub, diffusers and transformers.
"""

import hashlib
import http.server
import json
import os
import pathlib
import signal
import subprocess
import socket
import ssl
import sys
import tempfile
import threading
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
NAME = "tiny/model"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
HEARTH = str(pathlib.Path(sys.argv[1]).resolve())


class Hub(http.server.BaseHTTPRequestHandler):
    """The hub's interface, from a folder. Large files are elsewhere, as at the hub."""

    protocol_version = "HTTP/1.1"
    files = {}
    sent = 0
    pause = 0.0
    tokens = []

    def log_message(self, *_):
        pass

    def reply(self, status, body=b"", **headers):
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            try:
                for start in range(0, len(body), 65536):
                    self.wfile.write(body[start : start + 65536])
                    Hub.sent += len(body[start : start + 65536])
                    time.sleep(Hub.pause)
            except OSError:
                self.close_connection = True

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        is_cdn = self.server.server_port == Hub.cdn_port
        Hub.tokens.append((is_cdn, self.headers.get("Authorization")))
        path = self.path.split("?")[0]
        if path == f"/api/models/{NAME}/revision/main":
            info = {"id": NAME, "sha": COMMIT, "siblings": [{"rfilename": name} for name in Hub.files]}
            return self.reply(200, json.dumps(info).encode(), Content_Type="application/json", X_Repo_Commit=COMMIT)
        if path == f"/api/models/{NAME}/tree/{COMMIT}":
            return self.reply(200, json.dumps([entry(name) for name in Hub.files]).encode(), Content_Type="application/json")
        name = path.removeprefix(f"/{NAME}/resolve/{COMMIT}/").removeprefix(f"/{NAME}/resolve/main/").removeprefix("/cdn/")
        if name not in Hub.files:
            return self.reply(404, X_Error_Code="EntryNotFound", X_Repo_Commit=COMMIT)
        body = Hub.files[name]
        if is_large(body) and not is_cdn:
            return self.reply(
                302, Location=f"http://127.0.0.1:{Hub.cdn_port}/cdn/{name}", X_Repo_Commit=COMMIT,
                X_Linked_Etag=f'"{sha256(body)}"', X_Linked_Size=str(len(body)),
            )
        etag = sha256(body) if is_large(body) else git_sha1(body)
        headers = {"ETag": f'"{etag}"', "X_Repo_Commit": COMMIT, "Accept_Ranges": "bytes"}
        wanted = self.headers.get("Range", "")
        if wanted.startswith("bytes="):
            first, _, last = wanted.removeprefix("bytes=").partition("-")
            first, last = int(first), min(int(last or len(body)), len(body) - 1)
            return self.reply(206, body[first : last + 1], Content_Range=f"bytes {first}-{last}/{len(body)}", **headers)
        self.reply(200, body, **headers)


def is_large(body):
    return len(body) > 4096


def sha256(body):
    return hashlib.sha256(body).hexdigest()


def git_sha1(body):
    return hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()


def entry(name):
    body = Hub.files[name]
    found = {"type": "file", "path": name, "size": len(body), "oid": git_sha1(body)}
    if is_large(body):
        found["lfs"] = {"oid": sha256(body), "size": len(body), "pointerSize": 135}
    return found


def serve(folder):
    Hub.files = {str(path.relative_to(folder)): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}
    servers = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) for _ in range(2)]
    Hub.port, Hub.cdn_port = (server.server_port for server in servers)
    for server in servers:
        server.daemon_threads = True
        server.handle_error = lambda *_: None
        threading.Thread(target=server.serve_forever, daemon=True).start()


def environment(cache):
    kept = {name: value for name, value in os.environ.items() if "proxy" not in name.lower() and not name.startswith("HF_")}
    own = {"HF_ENDPOINT": f"http://127.0.0.1:{Hub.port}", "HF_HUB_CACHE": str(cache), "HF_TOKEN": "hf_secret"}
    return {**kept, **own, "HF_HUB_DISABLE_XET": "1", "HF_HUB_DISABLE_PROGRESS_BARS": "1", "XDG_CACHE_HOME": str(cache) + "-hearth"}


def hearth(cache, *arguments, **more):
    return subprocess.run([HEARTH, *arguments], env=environment(cache), capture_output=True, text=True, **more)


def python(cache, code, **more):
    return subprocess.run([sys.executable, "-c", code], env=environment(cache), capture_output=True, text=True, **more)


DOWNLOAD = f"import huggingface_hub; print(huggingface_hub.snapshot_download({NAME!r}))"
OFFLINE = f"import huggingface_hub; print(huggingface_hub.snapshot_download({NAME!r}, local_files_only=True))"
SCAN = """
import huggingface_hub
found = huggingface_hub.scan_cache_dir()
assert not found.warnings, found.warnings
[repo] = found.repos
[revision] = repo.revisions
print(repo.repo_id, revision.commit_hash, sorted(revision.refs), revision.nb_files)
"""
LOAD = f"""
import diffusers, torch
pipeline = diffusers.StableDiffusion3Pipeline.from_pretrained({NAME!r}, local_files_only=True, torch_dtype=torch.float32)
image = pipeline("a fox", height=16, width=16, num_inference_steps=1).images[0]
print(image.size)
"""

results = []


def check(what, is_right, output=None):
    results.append(bool(is_right))
    print(f"{'ok  ' if is_right else 'FAIL'} {what}")
    if not is_right and output is not None:
        print(getattr(output, "stdout", output), getattr(output, "stderr", ""))


def hearth_then_python(place):
    cache = place / "ours"
    fetched = hearth(cache, "fetch", NAME, "--json")
    check("hearth fetches a pipeline", fetched.returncode == 0, fetched)
    check("the token stays with the hub", all((token is None) == is_cdn for is_cdn, token in Hub.tokens), Hub.tokens)
    offline = python(cache, OFFLINE)
    check("snapshot_download finds it offline", offline.stdout.strip() == json.loads(fetched.stdout)["snapshot"], offline)
    scan = python(cache, SCAN)
    n_files = len(json.loads(fetched.stdout)["files"])
    check("scan_cache_dir reads it", scan.stdout.split() == [NAME, COMMIT, "['main']", str(n_files)], scan)
    load = python(cache, LOAD)
    check("diffusers draws with it", load.stdout.strip().endswith("(16, 16)"), load)
    before = Hub.sent
    download = python(cache, DOWNLOAD)
    selected = {file["path"] for file in json.loads(fetched.stdout)["files"]}
    others = sum(len(body) for name, body in Hub.files.items() if name not in selected)
    # Lists and answers to HEAD are counted too.
    check("Python downloads only what hearth left out", download.returncode == 0 and Hub.sent - before < others + 50_000, download)


def python_then_hearth(place):
    cache = place / "theirs"
    download = python(cache, DOWNLOAD)
    check("Python downloads everything", download.returncode == 0, download)
    inspected = hearth(cache, "inspect", NAME)
    check("hearth inspects it by name", inspected.returncode == 0 and "diffusion_pytorch_model" in inspected.stdout, inspected)
    fetched = hearth(cache, "fetch", NAME, "--json")
    check("hearth fetches none of it again", fetched.returncode == 0 and json.loads(fetched.stdout)["transferred_bytes"] == 0, fetched)
    job = ["--images", str(place / "images"), "--out", str(place / "run"), "--steps", "2", "--resolution", "64", "--device", "cpu"]
    settings = ["data.draw=neon", "data.draw_count=3", "data.bucket_step=16", "sample.prompts=[]"]
    trained = hearth(cache, "train", "--base", NAME, *job, *(word for setting in settings for word in ("--set", setting)))
    check("hearth trains it by name", trained.returncode == 0, trained)


def both_at_once(place):
    cache, Hub.pause = place / "shared", 0.002
    programs = [[HEARTH, "fetch", NAME], [sys.executable, "-c", DOWNLOAD]] * 2
    running = [subprocess.Popen(words, env=environment(cache), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for words in programs]
    outcomes = [(process.communicate(timeout=120), process.returncode) for process in running]
    check("two of each at the same time", all(code == 0 for _, code in outcomes), outcomes)
    wrong = [name for name, body in Hub.files.items() if read(cache, name) != body]
    check("every file is whole", not wrong, wrong)
    left = [path.name for path in (cache / "models--tiny--model/blobs").iterdir() if "." in path.name]
    check("nothing is left over", not left, left)
    Hub.pause = 0.0


def killed(place):
    cache, Hub.pause = place / "killed", 0.005
    Hub.files["vae/diffusion_pytorch_model.safetensors"] = os.urandom(8 << 20)
    for _ in range(4):
        begun, process = Hub.sent, subprocess.Popen([HEARTH, "fetch", NAME], env=environment(cache), stdout=subprocess.DEVNULL)
        while Hub.sent < begun + (1 << 20) and process.poll() is None:
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.wait()
    Hub.pause = 0.0
    fetched = hearth(cache, "fetch", NAME, "--json")
    rest = json.loads(fetched.stdout)["transferred_bytes"] if fetched.returncode == 0 else None
    check(f"after four kills, {rest} of 8 MiB and the rest were still to come", rest is not None and rest < 8 << 20, fetched)
    name = "vae/diffusion_pytorch_model.safetensors"
    check("the file is whole", read(cache, name) == Hub.files[name])
    check("scan_cache_dir reads it", python(cache, SCAN).returncode == 0)


class Proxy(http.server.BaseHTTPRequestHandler):
    """Passes encrypted connections on, as a company's proxy does."""

    asked = []

    def log_message(self, *_):
        pass

    def do_CONNECT(self):
        Proxy.asked.append(self.path)
        host, _, port = self.path.partition(":")
        there = socket.create_connection((host, int(port)))
        self.send_response(200)
        self.end_headers()

        def copy(source, target):
            try:
                while data := source.recv(65536):
                    target.sendall(data)
                target.shutdown(socket.SHUT_WR)
            except OSError:
                pass

        back = threading.Thread(target=copy, args=(there, self.connection), daemon=True)
        back.start()
        copy(self.connection, there)
        back.join()
        there.close()


def encrypted(place):
    """The same by TLS, with certificates of our own."""
    key = ["-newkey", "rsa:2048", "-nodes", "-days", "2"]
    subprocess.run(["openssl", "req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=test"], cwd=place, check=True, capture_output=True)
    subprocess.run(["openssl", "req", *key, "-keyout", "own.key", "-out", "own.csr", "-subj", "/CN=localhost"], cwd=place, check=True, capture_output=True)
    (place / "names").write_text("subjectAltName=DNS:localhost\n")
    sign = ["openssl", "x509", "-req", "-in", "own.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2", "-extfile", "names", "-out", "own.pem"]
    subprocess.run(sign, cwd=place, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(place / "own.pem", place / "own.key")
    [server, proxy] = [http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) for handler in (Hub, Proxy)]
    server.socket = context.wrap_socket(server.socket, server_side=True)
    for each in (server, proxy):
        each.daemon_threads = True
        threading.Thread(target=each.serve_forever, daemon=True).start()
    # Large files too: from encrypted to plain is no redirect that is followed.
    saved, Hub.files = Hub.files, {"config.json": b"{}", "model.safetensors": b"x" * 2000}

    def fetch(name, **more):
        own = {"HF_ENDPOINT": f"https://localhost:{server.server_port}", "SSL_CERT_FILE": str(place / "ca.pem"), **more}
        return subprocess.run([HEARTH, "fetch", NAME], env={**environment(place / name), **own}, capture_output=True, text=True)

    fetched = fetch("tls")
    check("hearth fetches by TLS", fetched.returncode == 0 and "hf_secret" not in fetched.stdout + fetched.stderr, fetched)
    begun, refused = time.time(), fetch("untrusted", SSL_CERT_FILE="")
    told = refused.returncode == 1 and "certificate" in refused.stderr and time.time() - begun < 5
    check("a certificate that nobody signed is refused", told, refused)
    missing = fetch("none", SSL_CERT_FILE=str(place / "names"))
    check("without certificates nothing is sent", "no certificates" in missing.stderr, missing)
    by_proxy = f"http://127.0.0.1:{proxy.server_port}"
    fetched = fetch("proxied", HTTPS_PROXY=by_proxy)
    check("hearth fetches by a proxy", fetched.returncode == 0 and Proxy.asked, fetched)
    Proxy.asked.clear()
    fetched = fetch("direct", HTTPS_PROXY=by_proxy, NO_PROXY="localhost")
    check("and past it", fetched.returncode == 0 and not Proxy.asked, fetched)
    Hub.files = {**Hub.files, "model.safetensors": b"x" * 9000}
    refused = fetch("downgrade")
    check("a redirect to a plain connection is not followed", "a redirect without an address" in refused.stderr, refused)
    Hub.files = saved


def read(cache, name):
    path = cache / "models--tiny--model/snapshots" / COMMIT / name
    return path.read_bytes() if path.exists() else None


serve(ROOT / "tests/golden/sd3/pipeline")
with tempfile.TemporaryDirectory() as folder:
    for part in [hearth_then_python, python_then_hearth, both_at_once, killed, encrypted]:
        part(pathlib.Path(folder))
print(f"the hub: {sum(results)} passed, {len(results) - sum(results)} failed")
sys.exit(0 if all(results) else 1)
