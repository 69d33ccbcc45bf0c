"""The dashboard in a real terminal of 80 columns and 24 rows: tmux presses keys and reads the screen.

usage: tmux.py HEARTH

A live run of the demo is asked by keys to sample, save, pause, go on and stop; each is seen on the screen and in its
events. `hearth watch` beside it draws only ASCII where the locale has nothing else, and no colours with NO_COLOR.
"""

import json
import os
import pathlib
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
# Colours of a terminal's escapes: 30 to 49, 90 to 107, and 38 and 48 with more behind.
COLOUR = re.compile(r"\x1b\[(?:[0-9;]*;)?(?:[34][0-8]|9[0-7]|10[0-7])(?:;[0-9;]*)?m")


class Tmux:
    """A server of its own, with a session of one window for each program."""

    def __init__(self, place):
        self.socket = place / "tmux"
        self.environment = {**os.environ, "LC_ALL": "C.UTF-8", "TERM": "xterm-256color"}
        for name in ("NO_COLOR", "TMUX"):
            self.environment.pop(name, None)

    def call(self, *arguments):
        command = ["tmux", "-u", "-S", self.socket, "-f", "/dev/null", *arguments]
        return subprocess.run(command, env=self.environment, check=True, capture_output=True, text=True).stdout

    def open(self, name, command, **environment):
        """A program in a terminal; its exit code stays on the screen."""
        set_ = [f"{name}={value}" for name, value in environment.items()]
        words = ["env", *set_, *map(str, command)]
        shell = subprocess.list2cmdline(words) + "; echo its exit code is $?; exec sleep 600"
        self.call("new-session", "-d", "-s", name, "-x", "80", "-y", "24", shell)

    def press(self, name, key):
        self.call("send-keys", "-t", name, key)

    def screen(self, name, *more):
        return self.call("capture-pane", "-p", "-t", name, *more)

    def close(self):
        subprocess.run(["tmux", "-S", self.socket, "kill-server"], capture_output=True)


def events(run, kind):
    # The last line may be half written.
    path = run / "events.jsonl"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return [it for it in map(json.loads, lines) if it["event"] == kind]


def processes(run):
    """The programs that were started for a run."""
    found = []
    for path in pathlib.Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
        except OSError:
            continue
        if f"--out={run}".encode() in words:
            found.append(int(path.parent.name))
    return found


def answered(run, request):
    """Answers to what was asked, all of them granted."""
    answers = [it for it in events(run, "request") if it.get("asked", {}).get("request") == request]
    assert not any(it.get("refused") for it in answers), answers
    return answers


def main():
    hearth = pathlib.Path(sys.argv[1]).resolve()
    place = pathlib.Path(tempfile.mkdtemp(prefix="hearth-tmux-"))
    run, tmux, passed = place / "neon", Tmux(place), 0
    job = [hearth, "train", ROOT / "recipes/demo.toml", f"--out={run}", "--steps=100000", f"--set=data.images={place / 'images'}",
           "--set=sample.every=off", "--set=sample.prompts=['neon style']", "--set=sample.steps=4"]

    def check(what, secs, condition, name="train"):
        nonlocal passed
        end = time.monotonic() + secs
        while not condition():
            assert time.monotonic() < end, f"not within {secs} s: {what}\n{tmux.screen(name)}"
            time.sleep(0.2)
        passed += 1
        print(f"ok: {what}", flush=True)

    def is_on_screen(*texts, name="train"):
        screen = tmux.screen(name)
        return all(text in screen for text in texts)

    try:
        tmux.open("train", job)
        check("a dashboard of 80 columns and 24 rows", 120, lambda: is_on_screen(
            "neon training", "/100,000 steps", " loss ", " seconds per step ", " machine ", " memory, of plan ", " events ", "? help"))
        check("with dots, frames and colours", 30, lambda: COLOUR.search(tmux.screen("train", "-e")) and is_on_screen("╭")
              and re.search("[\u2801-\u28ff]", tmux.screen("train")))
        ask(tmux, check, run, is_on_screen)
        watch(tmux, check, run, hearth)
        tmux.press("train", "x")
        check("x asks first", 10, lambda: is_on_screen("stop the run?"))
        tmux.press("train", "y")
        check("y stops it", 60, lambda: answered(run, "stop") and events(run, "end"))
        last = events(run, "end")[-1]
        assert last["reason"] == "interrupted", last
        check("the terminal is given back", 30, lambda: is_on_screen("its exit code is 130") and not is_on_screen(" seconds per step "))
        tmux.open("lost", [*job, "--resume"])
        n_steps = len(events(run, "step"))
        check("it resumes", 120, lambda: len(events(run, "step")) > n_steps, "lost")
        tmux.call("kill-session", "-t", "lost")
        check("a terminal that is gone ends it in order", 60, lambda: len(events(run, "end")) == 2 and not processes(run))
        print(f"a terminal: {passed} passed, 0 failed")
    finally:
        tmux.close()
        for process in processes(run):
            os.kill(process, signal.SIGKILL)
        shutil.rmtree(place, ignore_errors=True)


def ask(tmux, check, run, is_on_screen):
    """Keys of a run that goes on."""
    tmux.press("train", "?")
    check("help covers the screen", 10, lambda: is_on_screen(" keys ", "any key closes this"))
    tmux.press("train", "Space")
    check("and any key closes it", 10, lambda: not is_on_screen("any key closes this"))
    before = len(events(run, "image_sample"))
    tmux.press("train", "s")
    check("s samples", 60, lambda: len(events(run, "image_sample")) > before and answered(run, "sample"))
    check("and says so", 10, lambda: is_on_screen("asked to sample: done"))
    before = len(events(run, "checkpoint"))
    tmux.press("train", "c")
    check("c saves", 60, lambda: len(events(run, "checkpoint")) > before and answered(run, "save"))
    check("and says so", 10, lambda: is_on_screen("asked to save: done"))
    tmux.press("train", "p")
    check("p pauses", 30, lambda: answered(run, "pause") and is_on_screen("neon paused", "p resume"))
    # The step at hand still ends.
    time.sleep(1)
    step = len(events(run, "step"))
    time.sleep(1)
    assert len(events(run, "step")) == step, "it stands still"
    tmux.press("train", "p")
    check("p goes on", 30, lambda: answered(run, "resume") and is_on_screen("neon training", "p pause"))
    check("with steps", 30, lambda: len(events(run, "step")) > step)


def watch(tmux, check, run, hearth):
    """The same run in other terminals, which cannot show everything."""
    tmux.open("ascii", [hearth, "watch", run], LC_ALL="C")
    tmux.open("plain", [hearth, "watch", run], NO_COLOR="1")
    for name in ("ascii", "plain"):
        is_drawn = lambda: all(it in tmux.screen(name) for it in ("neon training", " loss ", "smoothed", "? help"))
        check(f"hearth watch draws it too: {name}", 30, is_drawn, name)
    screen = tmux.screen("ascii")
    assert screen.isascii(), [line for line in screen.splitlines() if not line.isascii()]
    assert COLOUR.search(tmux.screen("ascii", "-e")), "colours need no more than ASCII"
    coloured = COLOUR.findall(tmux.screen("plain", "-e"))
    assert not coloured and not tmux.screen("plain").isascii(), coloured
    for name in ("ascii", "plain"):
        tmux.press(name, "q")
        check(f"q leaves it: {name}", 10, lambda: "its exit code is 0" in tmux.screen(name), name)
    step = len(events(run, "step"))
    check("and the run goes on", 30, lambda: len(events(run, "step")) > step)


if __name__ == "__main__":
    main()
