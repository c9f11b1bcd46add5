"""The pictures of docs/: each stage's default run, its report in headless Chromium at the width of a phone and of a desk.

python3 tools/docs/pictures.py [STAGE …] [--runs DIR] [--full DIR]

A run that is not in DIR (runs/pictures by default) yet is made first, by `./bazelw run //stages:STAGE`, minutes in all. A report that
asks the network for anything, writes to the console, or is wider than the screen ends the script with code 1, and so does a browser that
does not tell of a page that does all three. Needs Debian's chromium; $CHROMIUM names another. `--full` also keeps whole pages as PNG files.
"""

import argparse
import base64
import itertools
import json
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).absolute().parents[2]
STAGES = ("pretrain", "sft", "reference", "dpo", "grpo", "prm", "ppo", "path_bias", "evaluate", "build_data")  # those that leave a report
SIZES = {"phone": (390, 844), "desktop": (1280, 900)}
TALLEST = {"phone": 1700, "desktop": 1500}  # of a kept picture, in the page's pixels
KEPT_SCALE = {"phone": 0.6, "desktop": 0.5}
PLANTED = """<!DOCTYPE html><meta name="viewport" content="width=device-width"><div style="width:1000px">x</div>
<img src="http://127.0.0.1:9/x.png"><script>console.error("planted")</script>"""
TRIPWIRE = ["optimizer.lr=0.03"]  # a learning rate far too high, for the picture of a run that was stopped


class Browser:
    """Chromium, told what to do over a pipe (DevTools protocol): messages are JSON, ended by a zero byte."""

    def __init__(self, program: str) -> None:
        self._profile = tempfile.mkdtemp(prefix="pictures-")
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def pipes() -> None:  # the browser reads 3 and writes 4
            a, b = os.dup(to_child), os.dup(from_child)
            os.dup2(a, 3)
            os.dup2(b, 4)

        command = [
            program, "--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
            "--disable-background-networking", f"--user-data-dir={self._profile}", "--remote-debugging-pipe", "about:blank",
        ]  # fmt: skip
        self._process = subprocess.Popen(command, preexec_fn=pipes, close_fds=False, stdin=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        os.close(to_child)
        os.close(from_child)
        self._numbers, self._left = itertools.count(1), b""
        self.events: list[dict[str, Any]] = []
        target = self("Target.createTarget", url="about:blank")["targetId"]
        self._session = ""
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Log", "Runtime"):
            self(f"{domain}.enable")

    def __call__(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._numbers)
        session = {"sessionId": self._session} if getattr(self, "_session", "") else {}
        os.write(self._out, json.dumps({"id": number, "method": method, "params": params, **session}).encode() + b"\0")
        while True:
            message = self._read()
            if message.get("id") == number:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']}")
                return message["result"]
            self.events.append(message)

    def wait(self, event: str) -> None:
        while not any(message.get("method") == event for message in self.events):
            self.events.append(self._read())

    def _read(self) -> dict[str, Any]:
        while b"\0" not in self._left:
            piece = os.read(self._in, 1 << 20)
            if not piece:
                raise RuntimeError("the browser ended")
            self._left += piece
        line, _, self._left = self._left.partition(b"\0")
        return json.loads(line)

    def close(self) -> None:
        self._process.terminate()
        self._process.wait()
        shutil.rmtree(self._profile, ignore_errors=True)


def look(browser: Browser, report: Path, size: str, *, dark: bool = False) -> tuple[list[str], int]:
    """Opens the report; returns what is wrong with it and the page's height."""
    width, height = SIZES[size]
    browser.events.clear()
    browser("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=size == "phone")
    browser("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])
    url = report.absolute().as_uri()
    browser("Page.navigate", url=url)
    browser.wait("Page.loadEventFired")
    wide, tall = browser(
        "Runtime.evaluate", expression="[document.documentElement.scrollWidth, document.documentElement.scrollHeight]", returnByValue=True
    )["result"]["value"]  # fmt: skip
    wrong = [f"{wide} pixels wide on a screen of {width}"] if wide > width else []
    for event in browser.events:
        method, told = event.get("method"), event.get("params", {})
        if method == "Network.requestWillBeSent" and told["request"]["url"] != url and not told["request"]["url"].startswith("data:"):
            wrong.append(f"asks for {told['request']['url']}")
        if method == "Log.entryAdded":
            wrong.append(f"console: {told['entry']['text']}")
        if method in ("Runtime.consoleAPICalled", "Runtime.exceptionThrown"):
            wrong.append(f"console: {json.dumps(told)[:300]}")
    return wrong, tall


def picture(browser: Browser, size: str, tall: int, *, scale: float, form: str) -> bytes:
    clip = {"x": 0, "y": 0, "width": SIZES[size][0], "height": tall, "scale": scale}
    quality = {"quality": 55} if form == "webp" else {}
    return base64.b64decode(browser("Page.captureScreenshot", format=form, clip=clip, captureBeyondViewport=True, **quality)["data"])


def run_of(stage: str, runs: Path, *words: str, name: str = "") -> Path:
    """The stage's run directory, made now where it is not there. A tripwire's exit code 4 is what some are made for."""
    run = runs / (name or stage)
    if not (run / "report.html").is_file():
        command = ["./bazelw", "run", f"//stages:{stage}", "--", f"run_dir={run}", *words]
        print(" ".join(command), flush=True)
        code = subprocess.run(command, cwd=ROOT, check=False).returncode
        if code not in (0, 4):
            raise SystemExit(f"pictures: //stages:{stage} ended with code {code}")
    return run


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="pictures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("stages", nargs="*", metavar="STAGE", help=f"default: all of {', '.join(STAGES)}, and the README's")
    parser.add_argument("--runs", type=Path, default=ROOT / "runs/pictures")
    parser.add_argument("--full", type=Path, help="folder for whole pages as PNG")
    options = parser.parse_args(argv)
    program = os.environ.get("CHROMIUM") or shutil.which("chromium")
    if program is None:
        parser.error("no chromium here; apt-get install chromium, or set CHROMIUM")
    if unknown := set(options.stages) - {*STAGES}:
        parser.error(f"{', '.join(unknown)}: no stage with a report; there are {', '.join(STAGES)}")
    runs = {stage: run_of(stage, options.runs) for stage in options.stages or STAGES}
    folder, wrong = ROOT / "docs/reports", 0
    folder.mkdir(exist_ok=True)
    browser = Browser(program)
    try:
        with tempfile.TemporaryDirectory() as scratch:
            planted = Path(scratch, "planted.html")
            planted.write_text(PLANTED, encoding="utf-8")
            told = look(browser, planted, "phone")[0]
        if not all(any(part in complaint for complaint in told) for part in ("asks for http", "console", "pixels wide")):
            raise SystemExit(f"pictures: the browser does not tell of a planted page, only {told}")
        for stage, run in runs.items():
            for size in SIZES:
                complaints, tall = look(browser, run / "report.html", size)
                kept = picture(browser, size, min(tall, TALLEST[size]), scale=KEPT_SCALE[size], form="webp")
                (folder / f"{stage}-{size}.webp").write_bytes(kept)
                if options.full:
                    options.full.mkdir(parents=True, exist_ok=True)
                    (options.full / f"{stage}-{size}.png").write_bytes(picture(browser, size, tall, scale=1, form="png"))
                told = f"{stage:<11} {size:<8} page {SIZES[size][0]} × {tall}, picture {len(kept) / 1000:.0f} kB"
                print(told, *complaints, sep="; ", flush=True)
                wrong += len(complaints)
        if not options.stages:
            tripped = run_of("grpo", options.runs, *TRIPWIRE, name="tripwire")
            for name, run, size, dark in (("desktop", runs["grpo"], "desktop", False), ("phone", runs["grpo"], "phone", False),
                                          ("tripwire-dark", tripped, "desktop", True)):  # fmt: skip
                complaints, tall = look(browser, run / "report.html", size, dark=dark)
                (ROOT / f"docs/report-{name}.webp").write_bytes(picture(browser, size, min(tall, 1150), scale=1, form="webp"))
                print(f"report-{name}.webp", *complaints, sep="; ")
                wrong += len(complaints)
    finally:
        browser.close()
    print(f"{wrong} complaints")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
