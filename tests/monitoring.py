"""Prometheus itself reads the metrics of `hearth serve`: both formats, the alert rules, every query of the dashboard.

usage: monitoring.py HEARTH        with prometheus and promtool of Debian
"""

import json
import pathlib
import re
import signal
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request

ROOT = pathlib.Path(__file__).resolve().parent.parent
FILES = ROOT / "assets/monitoring"


def get(url, accept=None):
    request = urllib.request.Request(url, headers={"Accept": accept} if accept else {})
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.headers["Content-Type"], answer.read().decode()


def main():
    hearth = pathlib.Path(sys.argv[1]).resolve()
    subprocess.run(["promtool", "check", "rules", FILES / "alerts.yml"], check=True)
    subprocess.run(["promtool", "test", "rules", "alerts_test.yml"], check=True, cwd=FILES)
    subprocess.run(["promtool", "check", "config", FILES / "prometheus.yml"], check=True)
    with tempfile.TemporaryDirectory() as place:
        place = pathlib.Path(place)
        job = ["train", ROOT / "recipes/lm-tiny.toml", "--quiet", f"--out={place / 'runs/tiny'}", "--steps=6"]
        subprocess.run([hearth, *job], check=True)
        write_ranks(place / "runs/pair")
        serving = subprocess.Popen([hearth, "serve", place / "runs", "--port=0"], stdout=subprocess.PIPE, text=True)
        url = next(found[1] for line in serving.stdout if (found := re.search(r"(http://\S+)/\?", line)))
        prometheus = None
        try:
            look_at_text(url)
            prometheus = start(place, url)
            look_at_queries("http://127.0.0.1:19327")
        finally:
            for process in filter(None, (serving, prometheus)):
                process.send_signal(signal.SIGTERM)
                process.wait(30)
    print("monitoring: 3 passed, 0 failed")


def write_ranks(run):
    """A run of two ranks that went on after a break, each part with what its ranks waited."""
    [begin] = [line for line in (run.parent / "tiny/events.jsonl").read_text().splitlines() if '"event":"begin"' in line]
    begin, lines = json.loads(begin) | {"time": time.time()}, []
    for waited in ([1.5, 2.0], [0.5, 4.0]):
        ranks = [{"node": node, "device": "cpu", "samples": 1, "compute_secs": 1, "wait_secs": 0.5, "exchange_secs": 0,
                  "waited_secs": secs} for node, secs in zip(("mac", "spark"), waited)]
        lines += [begin, {"event": "ranks", "step": 1, "ranks": ranks}]
    run.mkdir()
    (run / "events.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))


def look_at_text(url):
    end = time.monotonic() + 30
    while 'hearth_step_total{run="tiny"} 6' not in (text := get(f"{url}/metrics")[1]):
        assert time.monotonic() < end, text
        time.sleep(0.2)
    kind, text = get(f"{url}/metrics")
    assert kind.startswith("text/plain; version=0.0.4"), kind
    said = subprocess.run(["promtool", "check", "metrics"], input=text, text=True, capture_output=True)
    # The name is older than its advice: a gauge that ends in _info, and units spelled out.
    assert said.returncode == 0, said.stdout + said.stderr
    kind, text = get(f"{url}/metrics", "application/openmetrics-text; version=1.0.0")
    assert kind.startswith("application/openmetrics-text") and text.endswith("# EOF\n"), kind


def start(place, url):
    """Prometheus with the file that is shipped, but for the port."""
    config = (FILES / "prometheus.yml").read_text().replace("127.0.0.1:4327", url.removeprefix("http://")).replace("5s", "1s")
    (place / "prometheus.yml").write_text(config)
    (place / "alerts.yml").write_text((FILES / "alerts.yml").read_text())
    return subprocess.Popen(
        ["prometheus", f"--config.file={place / 'prometheus.yml'}", f"--storage.tsdb.path={place / 'data'}",
         "--web.listen-address=127.0.0.1:19327"], stderr=subprocess.DEVNULL)


def query(prometheus, expression):
    answer = json.loads(get(f"{prometheus}/api/v1/query?query={urllib.parse.quote(expression)}")[1])
    assert answer["status"] == "success", answer
    return answer["data"]["result"]


def look_at_queries(prometheus):
    end = time.monotonic() + 60
    while True:
        try:
            if query(prometheus, 'hearth_step_total{run="tiny"}'):
                break
        except OSError:
            pass
        assert time.monotonic() < end, "prometheus never saw the run"
        time.sleep(0.5)
    [target] = json.loads(get(f"{prometheus}/api/v1/targets")[1])["data"]["activeTargets"]
    assert target["health"] == "up" and not target["lastError"], target
    dashboard = json.loads((FILES / "grafana.json").read_text())
    names = set(re.findall(r"^# TYPE (\S+)", get(target["scrapeUrl"])[1], re.M))
    for panel in dashboard["panels"]:
        for it in panel["targets"]:
            query(prometheus, it["expr"].replace("$run", ".*").replace("$__rate_interval", "1m"))
            for name in re.findall(r"hearth_\w+", it["expr"]):
                assert name in names or re.sub(r"_(sum|count|bucket)$", "", name) in names, f"{name} is not exposed"
    waited = {it["metric"]["node"]: it["value"][1] for it in query(prometheus, "hearth_node_wait_seconds_total")}
    assert waited == {"mac": "2", "spark": "6"}, waited
    assert query(prometheus, 'hearth_loss{split="smoothed"}') and query(prometheus, "hearth_step_seconds_count == 6")
    rules = json.loads(get(f"{prometheus}/api/v1/rules")[1])["data"]["groups"][0]["rules"]
    assert all(rule["health"] in ("ok", "unknown") for rule in rules), rules


if __name__ == "__main__":
    main()
