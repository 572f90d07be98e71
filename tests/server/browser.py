"""A headless Chromium driven over two pipes: enough of its protocol to open a page, press keys and look."""

import base64
import fcntl
import json
import os
import shutil
import subprocess
import time

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One page. Blocks while it waits, so the server must run in another thread or process."""

    def __init__(self, folder, width=1100, height=800):
        to_child, self._out = os.pipe()
        self._in, from_child = os.pipe()

        def connect():  # the browser reads from descriptor 3 and writes to 4, which may be one of these two
            copies = [fcntl.fcntl(end, fcntl.F_DUPFD, 5) for end in (to_child, from_child)]  # never onto one in use
            os.dup2(copies[0], 3)
            os.dup2(copies[1], 4)

        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
                   f"--user-data-dir={folder}", f"--window-size={width},{height}", "--remote-debugging-pipe",
                   "--disable-background-networking", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen(
            [CHROMIUM, *options], preexec_fn=connect, close_fds=False, stderr=subprocess.DEVNULL
        )
        os.close(to_child)
        os.close(from_child)
        self._rest, self._number, self._session = b"", 0, None
        self.errors = []  # what the page's console reported
        targets = self.call("Target.getTargets")["targetInfos"]
        target = next(t["targetId"] for t in targets if t["type"] == "page")
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method, **params):
        """Send a command and wait for its result; events that come in between are looked at."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        while True:
            found = self._read()
            if found.get("id") == self._number:
                assert "error" not in found, found
                return found["result"]
            self._note(found)

    def _read(self):
        while b"\0" not in self._rest:
            data = os.read(self._in, 65536)
            assert data, "the browser is gone"
            self._rest += data
        text, _, self._rest = self._rest.partition(b"\0")
        return json.loads(text)

    def _note(self, event):
        if event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(event["params"]["exceptionDetails"])[:500])
        if event.get("method") == "Log.entryAdded" and event["params"]["entry"]["level"] == "error":
            self.errors.append(event["params"]["entry"]["text"] + " " + event["params"]["entry"].get("url", ""))

    def open(self, url):
        self.call("Page.navigate", url=url)
        self.until("document.readyState === 'complete' && location.href !== 'about:blank'")

    def run(self, script):
        """The value of an expression in the page."""
        result = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def until(self, script, seconds=15):
        """Wait until an expression is true."""
        end = time.monotonic() + seconds
        while not (value := self.run(script)):
            assert time.monotonic() < end, f"never true: {script}"
            time.sleep(0.03)
        return value

    def type(self, text):
        self.call("Input.insertText", text=text)

    def press(self, key, code=None, vk=0, text=""):
        for kind in ("keyDown", "keyUp"):
            extra = {"text": text} if text and kind == "keyDown" else {}
            self.call("Input.dispatchKeyEvent", type=kind, key=key, code=code or key, windowsVirtualKeyCode=vk, **extra)

    def enter(self):
        self.press("Enter", vk=13, text="\r")

    def click(self, selector):
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def text(self, selector):
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? null")

    def screenshot(self, path):
        with open(path, "wb") as file:
            file.write(base64.b64decode(self.call("Page.captureScreenshot", format="png")["data"]))

    def dark(self, on=True):
        features = [{"name": "prefers-color-scheme", "value": "dark" if on else "light"}]
        self.call("Emulation.setEmulatedMedia", features=features)

    def close(self):
        self._process.terminate()
        self._process.wait(10)
        os.close(self._out)
        os.close(self._in)
