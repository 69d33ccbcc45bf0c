"""A real browser clicks through a live run: Chromium by chromedriver, without packages of Python.

usage: browser.py HEARTH [SCREENSHOTS]

Starts a run of the demo and `hearth serve`, opens the page as a person would, asks for a sample, saves, pauses and
stops, plans and starts another run, and looks at what is on the screen each time. With a folder, leaves screenshots of
three widths there.
"""

import base64
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
import urllib.error
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
ELEMENT = "element-6066-11e4-a52e-4f735466cecf"


class Browser:
    """The WebDriver protocol, as much of it as is needed."""

    def __init__(self):
        self.driver = subprocess.Popen(
            ["chromedriver", "--port=0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        for line in self.driver.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                self.url = f"http://127.0.0.1:{found[1]}"
                break
        options = {"args": ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-color-profile=srgb"]}
        wanted = {"capabilities": {"alwaysMatch": {"goog:chromeOptions": options, "goog:loggingPrefs": {"browser": "ALL"}}}}
        self.session = ""
        self.session = "/session/" + self.call("POST", "/session", wanted)["sessionId"]

    def call(self, method, path, body=None):
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.url + self.session + path, data, {"Content-Type": "application/json"}, method=method
        )
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                return json.load(answer)["value"]
        except urllib.error.HTTPError as error:
            raise RuntimeError(error.read().decode()[:500]) from None

    def open(self, url):
        self.call("POST", "/url", {"url": url})

    def js(self, script, *arguments):
        return self.call("POST", "/execute/sync", {"script": script, "args": list(arguments)})

    def text(self):
        return self.js("return document.body.innerText")

    def size(self, width, height):
        self.call("POST", "/goog/cdp/execute", {"cmd": "Emulation.setDeviceMetricsOverride", "params": {
            "width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 600}})

    def click(self, text):
        """Clicks the button or link that says this."""
        found = self.call("POST", "/elements", {"using": "xpath", "value": f"//*[self::button or self::a][normalize-space()='{text}']"})
        assert found, f"nothing to click says {text!r}"
        self.call("POST", f"/element/{found[-1][ELEMENT]}/click", {})

    def type(self, selector, text):
        found = self.call("POST", "/element", {"using": "css selector", "value": selector})
        self.call("POST", f"/element/{found[ELEMENT]}/value", {"text": text})

    def shot(self, path):
        pathlib.Path(path).write_bytes(base64.b64decode(self.call("GET", "/screenshot")))

    def complaints(self):
        """What the browser's console has against the page."""
        logs = self.call("POST", "/se/log", {"type": "browser"})
        return [it["message"] for it in logs if it["level"] in ("SEVERE", "WARNING")]

    def close(self):
        try:
            self.call("DELETE", "")
        finally:
            self.driver.terminate()
            self.driver.wait()


def until(what, secs, condition):
    """Waits for something to be true, and says what it waited for."""
    end = time.monotonic() + secs
    while time.monotonic() < end:
        if value := condition():
            return value
        time.sleep(0.2)
    raise AssertionError(f"not within {secs} s: {what}")


def checkpoints(run):
    return sorted(it.name for it in (run / "checkpoints").glob("*"))


def events(run, kind):
    # The last line may be half written.
    lines = [json.loads(line) for line in (run / "events.jsonl").read_text().split("\n")[:-1]]
    return [it for it in lines if it["event"] == kind]


def main():
    hearth, shots = pathlib.Path(sys.argv[1]).resolve(), sys.argv[2:] and pathlib.Path(sys.argv[2])
    place = pathlib.Path(tempfile.mkdtemp(prefix="hearth-browser-"))
    runs, passed = place / "runs", 0
    runs.mkdir()
    # A prompt with markup: it is shown as text.
    evil = "<img src=x onerror=document.title=1>"
    job = [hearth, "train", ROOT / "recipes/demo.toml", "--quiet", f"--out={runs / 'neon'}", "--steps=100000",
           f"--set=data.images={place / 'images'}", "--set=data.validation=2", "--set=sample.every=off",
           f"--set=sample.prompts=['neon style, a red star', '{evil}']", "--set=sample.steps=4"]
    training = subprocess.Popen(job)
    serving = subprocess.Popen(
        [hearth, "serve", runs, "--port=0", f"--recipes={ROOT / 'recipes'}"], stdout=subprocess.PIPE, text=True
    )
    browser = None

    def check(what, secs, condition):
        nonlocal passed
        until(what, secs, condition)
        passed += 1
        print(f"ok: {what}")

    try:
        url = next(found[0] for line in serving.stdout if (found := re.search(r"http://\S+", line)))
        browser = Browser()
        browser.size(1440, 1000)
        browser.open(url.split("?")[0])
        check("without the token nothing is shown", 10, lambda: "token is missing" in browser.text())
        browser.complaints()
        browser.open(url)
        check("the token leaves the address bar", 10, lambda: "token" not in browser.js("return location.href"))
        check("the run is listed as running", 60, lambda: "neon" in browser.text() and "running" in browser.text())
        run = runs / "neon"
        until("the run takes steps", 120, lambda: (run / "events.jsonl").exists() and len(events(run, "step")) > 3)
        browser.js("document.querySelector('.runrow a').click()")
        check("the page of the run is live", 20, lambda: browser.js("return document.querySelector('#link')?.textContent || ''") == "live")
        step = "return Number((document.querySelector('.big b')?.textContent || '0').replace(/,/g, ''))"
        first = until("the page shows steps", 30, lambda: browser.js(step))
        check("steps go on by themselves", 20, lambda: browser.js(step) > first)
        check("the loss is drawn", 10, lambda: browser.js("return document.querySelectorAll('.curve').length") >= 3)
        check("a prompt with markup is text", 10, lambda: evil in browser.text() and not browser.js("return document.querySelector('img[src=x]')"))
        before = browser.js("return document.querySelectorAll('.thumb img').length")
        browser.click("Sample now")
        browser.type("dialog input", "neon style, a blue circle")
        browser.click("Sample")
        check("sample now makes an image appear", 60, lambda: browser.js("return document.querySelectorAll('.thumb img').length") > before)
        check("the images are loaded", 20, lambda: browser.js("return [...document.querySelectorAll('.thumb img')].every(it => it.naturalWidth > 0)"))
        saved = checkpoints(run)
        browser.click("Save")
        check("save leaves a checkpoint", 60, lambda: checkpoints(run) != saved)
        browser.click("Pause")
        check("pause is shown", 30, lambda: browser.js("return document.querySelector('.under .badge')?.textContent || ''") == "paused")
        browser.click("Resume")
        check("and the run goes on", 30, lambda: browser.js("return document.querySelector('.under .badge')?.textContent || ''").startswith("running"))
        change_settings(browser, check, run, evil)
        browser.js("document.querySelector('.thumb:last-of-type').click()")
        check("an image fills the window, with a slider", 10, lambda: browser.js("return document.querySelector('dialog.full .frame img')?.naturalWidth > 0"))
        if shots:
            browser.js("document.querySelector('.frame input').value = 450; document.querySelector('.frame input').dispatchEvent(new Event('input'))")
            browser.shot(shots / "compare.png")
        browser.js("document.querySelector('dialog.full').close()")
        if shots:
            screenshots(browser, shots)
        browser.click("Stop")
        until("stopping is confirmed", 10, lambda: "saves a checkpoint and ends" in browser.text())
        browser.click("Stop the run")
        check("the run ends in order", 60, lambda: training.poll() is not None)
        last = events(run, "end")[-1]
        assert last["reason"] == "interrupted", last
        check("stop leaves a checkpoint of its last step", 10, lambda: any(str(last["step"]) in it for it in checkpoints(run)))
        check("the page shows that it stopped", 20, lambda: "stopped" in browser.js("return document.querySelector('.under .badge')?.textContent || ''"))
        assert browser.js("return document.querySelector('.actions').hidden"), "nothing can be asked of it any more"
        start_another(browser, check, runs, place)
        compare(browser, check)
        bad = [it for it in browser.complaints() if "favicon" not in it and "events" not in it]
        assert not bad, bad
        print(f"a browser: {passed} passed, 0 failed")
    finally:
        if browser:
            browser.close()
        for process in (training, serving):
            process.send_signal(signal.SIGTERM)
            process.wait(30)
        shutil.rmtree(place, ignore_errors=True)


def change_settings(browser, check, run, evil):
    """Changes every setting that may change while a run works, and asks for one that is refused."""
    fields = "return Object.fromEntries([...document.querySelectorAll('dialog [name]')].map(it => [it.name, it.value]))"
    write = "const field = document.querySelector(`dialog [name='${arguments[0]}']`); field.value = arguments[1]"
    browser.click("Change")
    now = browser.js(fields)
    assert now == {"machine.mode": "balanced", "output.save_every": "250", "sample.every": "off",
                   "sample.prompts": f"neon style, a red star\n{evil}\nneon style, a blue circle"}, now
    wanted = {"machine.mode": "full", "output.save_every": "12345", "sample.every": "54321",
              "sample.prompts": "neon style, a 'red' star\nneon style, a \"blue\" circle"}
    for name, value in wanted.items():
        browser.js(write, name, value)
    browser.click("Change")
    job = lambda: (run / "config.toml").read_text()
    said = ('mode = "full" #', "save_every = 12345 #", "every = 54321 #", "a 'red' star")
    check("all settings are changed while the run works", 60, lambda: all(it in job() for it in said))
    check("and the run goes on with them", 60, lambda: events(run, "begin")[-1]["from_step"] < events(run, "step")[-1]["step"] and len(events(run, "begin")) > 1)
    check("then the form closes", 20, lambda: not browser.js("return document.querySelector('dialog')"))
    browser.click("Change")
    check("and has the new values", 10, lambda: browser.js(fields) == wanted)
    browser.js(write, "output.save_every", "never")
    browser.click("Change")
    check("a refusal says what is accepted", 30, lambda: "refused: `output.save_every` is \"never\", accepted is off or a whole number" in browser.text())
    browser.click("Cancel")
    assert 'save_every = 12345 #' in job(), "nothing is changed by it"


def start_another(browser, check, runs, place):
    """Plans and starts a run by the form; it outlives the page."""
    browser.click("New run")
    until("recipes are offered", 20, lambda: browser.js("return document.querySelectorAll('option').length") > 3)
    assert browser.js("return document.querySelectorAll('form button')[1].disabled"), "nothing is started without a plan"
    browser.js("const list = document.querySelector('select'); list.value = [...list.options].find(it => it.text === 'lm-tiny').value; list.dispatchEvent(new Event('change'))")
    browser.type("input[name=name]", "tiny")
    browser.type("input[name=steps]", "5")
    browser.type("input[name=text]", str(ROOT / "docs"))
    browser.click("Plan")
    check("the plan is shown", 60, lambda: "It fits" in browser.text())
    browser.click("Start")
    check("the page goes to the new run", 60, lambda: "tiny" in browser.js("return document.querySelector('h1')?.textContent || ''"))
    check("which ends as it should", 120, lambda: "finished" in browser.js("return document.querySelector('.under .badge')?.textContent || ''"))
    assert events(runs / "tiny", "end")[-1]["reason"] == "finished"


def compare(browser, check):
    browser.click("Compare")
    until("both runs can be chosen", 20, lambda: browser.js("return document.querySelectorAll('.chip input').length") == 2)
    for at in (0, 1):
        browser.js("document.querySelectorAll('.chip input')[arguments[0]].click()", at)
        time.sleep(1)
    check("two curves lie over each other", 20, lambda: browser.js("return document.querySelectorAll('.panel')[0].querySelectorAll('.curve').length") == 2)


def screenshots(browser, folder):
    for theme in ("light", "dark"):
        browser.js("localStorage.setItem('hearth.theme', arguments[0]); document.documentElement.dataset.theme = arguments[0]", theme)
        for name, width, height in (("wide", 1440, 1900), ("tablet", 820, 1800), ("phone", 390, 1700)):
            browser.size(width, height)
            time.sleep(1)
            browser.shot(folder / f"{name}-{theme}.png")
    browser.size(1440, 1000)


if __name__ == "__main__":
    os.environ.setdefault("HOME", "/")
    main()
