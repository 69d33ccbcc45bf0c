"""What open streams of `hearth serve` cost the steps of a live run.

usage: streams.py HEARTH [PAIRS] [SECONDS]        20 pairs of 10 s by default, seven minutes

One long run of the demo and one server beside it. Windows without a stream and with 50 take turns, the order swapped in
every second pair, so that a machine that drifts slows both alike; the first second of each is not counted. Streams are
opened by one process that begins at the last line, so that no history is sent, and reads and throws away what comes.
Its CPU time is that of browsers, which mostly are on other machines. For a machine that does nothing else.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
STREAMS = 50
DROPPED_SECS = 1.0
# The server may be so many lines behind the file; streams that begin later than it would be sent away.
LINES_BEHIND = 100
MARK_PERCENT = 1.0


def read_streams(host, port, path, token):
    """The client's process: opens streams, and looks twice a second at what has come."""
    running = [True]
    signal.signal(signal.SIGTERM, lambda *_: running.clear())
    request = f"GET {path} HTTP/1.1\r\nHost: {host}:{port}\r\nAuthorization: Bearer {token}\r\n\r\n".encode()
    streams, received, buffer = [], 0, bytearray(1 << 18)
    for _ in range(STREAMS):
        stream = socket.create_connection((host, int(port)), timeout=10)
        stream.sendall(request)
        stream.setblocking(False)
        streams.append(stream)
    while running:
        time.sleep(0.5)
        for stream in list(streams):
            try:
                n = stream.recv_into(buffer)
            except BlockingIOError:
                continue
            received += n
            if n == 0:
                streams.remove(stream)
    print(len(streams), received)


def cpu_secs(process):
    """CPU time of a process with its threads."""
    fields = pathlib.Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


class Steps:
    """The steps of a run as it writes them."""

    def __init__(self, run):
        self.path, self.place, self.n_lines = run / "events.jsonl", 0, 0

    def new(self):
        """End and seconds of each step since the last look."""
        if not self.path.exists():
            return []
        with self.path.open("rb") as file:
            file.seek(self.place)
            text = file.read()
        text = text[: text.rfind(b"\n") + 1]
        self.place += len(text)
        self.n_lines += text.count(b"\n")
        events = (json.loads(line) for line in text.splitlines() if b'"event":"step"' in line)
        return [(it["time"], it["secs"]) for it in events]


class Bench:
    def __init__(self, hearth, place, secs):
        self.hearth, self.place, self.secs, self.processes = hearth, place, secs, {}

    def begin(self):
        hearth, place, runs = self.hearth, self.place, self.place / "runs"
        runs.mkdir()
        job = ["train", ROOT / "recipes/demo.toml", "--quiet", f"--out={runs / 'long'}", "--steps=10000000",
               f"--set=data.images={place / 'images'}", "--set=sample.every=off", "--set=output.save_every=off"]
        self.processes["run"] = subprocess.Popen([hearth, *job])
        self.processes["server"] = server = subprocess.Popen(
            [hearth, "serve", runs, "--port=0"], stdout=subprocess.PIPE, text=True)
        found = next(found for line in server.stdout if (found := re.search(r"http://([^:]+):(\d+)/\?token=(\S+)", line)))
        self.host, self.port, self.token = found.groups()
        self.steps, taken, end = Steps(runs / "long"), 0, time.monotonic() + 300
        while (taken := taken + len(self.steps.new())) < 5:
            assert time.monotonic() < end and self.processes["run"].poll() is None, "the run takes no steps"
            time.sleep(1)
        self.id = self.ask("/api/runs")["runs"][0]["id"]
        self.epoch = self.ask(f"/api/runs/{self.id}")["epoch"]

    def ask(self, path):
        url = f"http://{self.host}:{self.port}{path}"
        with urllib.request.urlopen(urllib.request.Request(url, headers={"Authorization": f"Bearer {self.token}"})) as answer:
            return json.load(answer)

    def open(self):
        self.steps.new()
        after = max(0, self.steps.n_lines - LINES_BEHIND)
        path = f"/api/runs/{self.id}/events?after={after}&epoch={self.epoch}"
        self.processes["clients"] = subprocess.Popen(
            [sys.executable, __file__, "read", self.host, self.port, path, self.token], stdout=subprocess.PIPE, text=True)

    def close(self):
        clients = self.processes.pop("clients")
        clients.terminate()
        n, received = map(int, clients.communicate(timeout=30)[0].split())
        assert n == STREAMS and received > 0, f"{n} of {STREAMS} streams were open to the end, {received} bytes came"

    def window(self, has_streams):
        """Seconds of the steps in a window, and CPU time of each process."""
        if has_streams:
            self.open()
        time.sleep(DROPPED_SECS)
        begin, before = time.time(), {name: cpu_secs(it) for name, it in self.processes.items()}
        self.steps.new()
        time.sleep(self.secs - DROPPED_SECS)
        end, cpu = time.time(), {name: cpu_secs(it) - before[name] for name, it in self.processes.items()}
        if has_streams:
            self.close()
        assert self.processes["run"].poll() is None, "the run is over"
        # The last line of the window may still be on its way to the file.
        time.sleep(0.1)
        secs = [secs for time_, secs in self.steps.new() if begin <= time_ - secs and time_ <= end]
        assert secs, f"no step in {self.secs} s: longer windows are needed"
        return secs, cpu

    def stop(self):
        for process in reversed(self.processes.values()):
            process.terminate()
        for process in self.processes.values():
            try:
                process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def table(windows, counted_secs):
    """Steps and CPU time of the windows without and with streams."""
    print(f"\n{'':22}{'no stream':>14}{f'{STREAMS} streams':>14}")
    steps = [[secs for window in side for secs in window[0]] for side in windows]
    row = lambda name, unit, values: print(f"{name:22}" + "".join(f"{value:>11.2f} {unit:2}" for value in values))
    row("mean step", "ms", [1e3 * statistics.fmean(it) for it in steps])
    row("median step", "ms", [1e3 * statistics.median(it) for it in steps])
    print(f"{'steps':22}" + "".join(f"{len(it):>11}   " for it in steps))
    for name in ("run", "server", "clients"):
        values = [statistics.fmean(window[1].get(name, 0.0) for window in side) for side in windows]
        row(f"CPU of the {name}", "s", values)
    print(f"CPU time is that of {counted_secs:g} s on {os.cpu_count()} cores")


def verdict(windows, counted_secs):
    means = [[statistics.fmean(window[0]) for window in side] for side in windows]
    differences = [100 * (with_ / without - 1) for without, with_ in zip(*means)]
    mean = statistics.fmean(differences)
    error = statistics.stdev(differences) / len(differences) ** 0.5 if len(differences) > 1 else float("inf")
    clients = 100 * statistics.fmean(window[1]["clients"] for window in windows[1]) / counted_secs
    print(f"\ndifference of mean steps, by pairs: {mean:+.2f} % ± {error:.2f} % (standard error of {len(differences)} pairs)")
    print(f"the clients' own CPU time is {clients:.2f} % of one core: so much of it they can cost at most, here")
    if mean >= MARK_PERCENT:
        passed = mean - clients < MARK_PERCENT
        print("PASS without the clients, which would be elsewhere" if passed else f"FAIL: not below {MARK_PERCENT:g} %")
        return passed
    unsure = mean + 2 * error >= MARK_PERCENT
    print("PASS" + (f", but twice the error reaches {MARK_PERCENT:g} %: more pairs, or a quieter machine" if unsure else ""))
    return True


def main():
    hearth, pairs, secs = pathlib.Path(sys.argv[1]).resolve(), *(sys.argv[2:] + ["20", "10"][len(sys.argv) - 2:])[:2]
    pairs, secs, place = int(pairs), float(secs), pathlib.Path(tempfile.mkdtemp(prefix="hearth-streams-"))
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    windows, bench = ([], []), Bench(hearth, place, secs)
    try:
        bench.begin()
        bench.window(True)
        for pair in range(pairs):
            for has_streams in (pair % 2 == 1, pair % 2 == 0):
                windows[has_streams].append(bench.window(has_streams))
            mean = [1e3 * statistics.fmean(side[-1][0]) for side in windows]
            print(f"pair {pair + 1} of {pairs}: mean step {mean[0]:.2f} ms without, {mean[1]:.2f} ms with streams", flush=True)
    finally:
        bench.stop()
        shutil.rmtree(place, ignore_errors=True)
    table(windows, secs - DROPPED_SECS)
    sys.exit(0 if verdict(windows, secs - DROPPED_SECS) else 1)


if __name__ == "__main__":
    if sys.argv[1] == "read":
        read_streams(*sys.argv[2:])
    else:
        main()
