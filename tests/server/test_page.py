"""The chat page: what is served, and in a real browser (where there is one) what it does with hostile answers."""

import json
import re
import time
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.served import in_thread
from tinyserve.server import pages

from .browser import CHROMIUM, Browser
from .conftest import FakeEngine, client_of, refused, service_of

WEB = Path(pages.__file__).parent / "web"
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium here")
HOSTILE = """# Title <b>bold</b>

<script>window.hacked = 1</script><img src=x onerror="window.hacked = 2">
[click](javascript:window.hacked=3) [data](data:text/html,<script>window.hacked=4</script>) [ok](https://example.org/a)

```html
<img src=x onerror="window.hacked = 5"></code></pre><script>window.hacked = 6</script>
```

| a | <svg onload=window.hacked=7> |
|---|---|
| `x` | **y** |

- one
  1. inner
- two <iframe srcdoc="<script>parent.hacked=8</script>">
"""


async def get(path, **options):
    async with client_of(FakeEngine(), **options) as client:
        return await client.get(path)


@pytest.mark.parametrize("path", ["/", "/dashboard"])
def test_the_pages_and_their_files_come_from_here_and_may_run_nothing_else(run, path):
    """Also with keys and behind no login: the page asks for the key itself."""
    page = run(get(path, api_key=["k"]))
    policy = page.headers["content-security-policy"]
    linked = re.findall(r'(?:src|href)="(web/[^"]+)"', page.text)

    assert page.status_code == 200 and page.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in policy and "unsafe" not in policy and "frame-ancestors 'none'" in policy
    assert not re.search(r"<script(?![^>]*src=)| on\w+=|style=", page.text)
    for file in [*linked, *(f"web/{name}" for name in ("api.js", "markdown.js"))]:
        found = run(get("/" + file, api_key=["k"]))
        assert found.status_code == 200 and found.headers["x-content-type-options"] == "nosniff"
    for file in WEB.iterdir():
        assert not re.search(r"(?:src|href|url\(|from|import)\W*https?://", file.read_text()), file
    refused(run(get("/web/..%2fapp.py")), 404)
    refused(run(get("/web/none.js")), 404)


def test_nothing_in_the_scripts_makes_elements_of_text():
    words = "innerHTML|outerHTML|insertAdjacentHTML|document.write|eval\\(|new Function|setAttribute\\(.on|DOMParser"
    for path in WEB.glob("*.js"):
        assert not re.search(words, path.read_text()), path
        assert len(path.read_text().splitlines()) <= 400


@contextmanager
def page_of(engine, tmp_path, path="/", **options):
    """A browser on the page of a server that runs in a thread of its own."""

    async def make():
        return service_of(engine, port=0, **options)

    with in_thread(make) as server:
        browser = Browser(tmp_path / "profile")
        try:
            browser.open(server.address + path)
            yield browser
        finally:
            browser.close()


def say(browser, text):
    browser.run("document.querySelector('#input').focus()")
    browser.type(text)
    browser.enter()


def answered(browser, count=1):
    browser.until(f"document.querySelectorAll('article.assistant .regenerate').length === {count}")


@needs_browser
def test_an_answer_cannot_become_part_of_the_page(tmp_path):
    """Breaks if any text of a model becomes an element, an attribute or a script."""
    with page_of(FakeEngine(HOSTILE.encode(), max_model_len=4096), tmp_path) as browser:
        say(browser, "<script>window.hacked = 9</script>")
        answered(browser)
        names = browser.run("[...document.querySelectorAll('.assistant .body *')].map((e) => e.tagName)")
        links = browser.run("[...document.querySelectorAll('.assistant .body a')].map((e) => e.href)")

        assert browser.run("window.hacked ?? null") is None and browser.errors == []
        assert set(names) <= {
            "H3", "P", "DIV", "SPAN", "BUTTON", "PRE", "CODE", "TABLE", "THEAD", "TBODY", "TR", "TH", "TD", "STRONG",
            "UL", "OL", "LI", "A",
        }  # fmt: skip
        assert links == ["https://example.org/a"]
        assert "<script>window.hacked = 6</script>" in browser.text(".assistant pre")
        assert browser.text("article.user .body") == "<script>window.hacked = 9</script>"
        assert browser.text(".assistant ul > li ol > li") == "inner"


@needs_browser
def test_markdown_becomes_the_right_elements(tmp_path):
    cases = {
        "a **b** *c* `d` ~~e~~": "<p>a <strong>b</strong> <em>c</em> <code>d</code> <del>e</del></p>",
        "snake_case_name 2*3*4": "<p>snake_case_name 2<em>3</em>4</p>",
        "a\nb  \nc": "<p>a\nb<br>c</p>",
        "> q\n> r": "<blockquote><p>q\nr</p></blockquote>",
        "3. x\n4. y": '<ol start="3"><li>x</li><li>y</li></ol>',
        "- a\n\n- b": "<ul><li>a</li><li>b</li></ul>",
        "\\*no\\*": "<p>*no*</p>",
        "---": "<hr>",
        "``a`b``": "<p><code>a`b</code></p>",
        "**open": "<p>**open</p>",
        "## C# ##": "<h4>C#</h4>",
        "# ": "<h3></h3>",
        "~~~py x\na`\n~~~": '<div class="code-block"><div class="bar"><span class="dim small">py</span>'
        '<button type="button" class="copy">Copy</button></div>'
        '<pre tabindex="0"><code>a`</code></pre></div>',
        "a | b\n:-:|---\nc | d": "<table><thead><tr><th>a</th><th>b</th></tr></thead>"
        "<tbody><tr><td>c</td><td>d</td></tr></tbody></table>",
        "a | b\n- x": "<p>a | b</p><ul><li>x</li></ul>",
    }
    script = """import("./web/markdown.js").then(({ render }) => TEXTS.map((text) => {
        const box = document.createElement("div"); box.append(render(text)); return box.innerHTML; }))"""
    slow = ["`" * 8000, "*" * 8000, "[" * 8000, "[a](" * 2000, "_ " * 4000, "> " * 4000, "- " * 4000, "|" * 8000,
            "\\" * 8000, ("`a``b```c" * 900), "~~~\n" * 2000, "  - x\n" * 2000, "# a" + " " * 20000 + "x",
            "~" * 20000 + "`", "`" * 20000 + "\u2028`", "a|b\n-" + " " * 20000 + "x", "-" + " " * 20000 + "a\u2028",
            ">" + " " * 20000 + "\u2028", "a" + " " * 20000 + "b", "# " + "#" * 20000 + "a", "- " * 20000 + "x",
            "a|b\n" + "-|" * 20000 + "x"]  # fmt: skip
    timed = """import("./web/markdown.js").then(({ render }) => TEXTS.map((text) => {
        const start = performance.now(); render(text); return performance.now() - start; }))"""
    with page_of(FakeEngine(), tmp_path) as browser:
        found = browser.run(script.replace("TEXTS", json.dumps(list(cases))))
        spent = browser.run(timed.replace("TEXTS", json.dumps(slow)))

    assert dict(zip(cases, found, strict=True)) == cases
    assert max(spent) < 1000, spent


@needs_browser
def test_stop_regenerate_edit_and_history(tmp_path):
    """Escape ends the request in the engine; what was said is there after a reload; deleting forgets it."""
    engine = FakeEngine(b"word " * 40, delay=0.02, max_model_len=512)
    with page_of(engine, tmp_path) as browser:
        say(browser, "one")
        browser.until("document.querySelector('.assistant .body')?.innerText.includes('word word')")
        assert engine.running == 1 and browser.text("#speed").endswith("tokens/s")
        browser.press("Escape", vk=27)
        answered(browser)
        browser.until("document.querySelector('#stop').hidden")
        end = time.monotonic() + 2
        while engine.running and time.monotonic() < end:
            time.sleep(0.01)
        assert engine.running == 0
        engine.delay, engine.script = 0, list(b"short")
        browser.click(".regenerate")
        browser.until("document.querySelector('.assistant .body')?.innerText === 'short'")
        answered(browser)
        say(browser, "two")
        answered(browser, 2)
        assert [m["role"] for m in engine.chats[-1][0]] == ["user", "assistant", "user"]
        browser.call("Page.reload")
        browser.until("document.querySelectorAll('article').length === 4")
        assert "of 512 tokens" in browser.until("document.querySelector('#fill-text').innerText")
        browser.click("article.user .edit")
        assert browser.run("document.querySelector('#input').value") == "one"
        assert browser.run("document.querySelectorAll('article').length") == 0
        browser.click("#chats li button:last-child")
        assert browser.run("localStorage.getItem('tinyserve.chats')") == "[]"
        assert browser.errors == []


@needs_browser
def test_a_chat_that_another_page_deletes_stays_deleted(tmp_path):
    """It came back when its answer ended here; asked on, it is a chat of its own."""
    engine = FakeEngine(b"word " * 30, delay=0.02, max_model_len=512)
    stored = "JSON.parse(localStorage.getItem('tinyserve.chats')).map((chat) => chat.messages.length).join()"
    with page_of(engine, tmp_path) as browser:
        say(browser, "one")
        browser.until("document.querySelector('.assistant .body')?.innerText.includes('word word')")
        module = browser.run("[...document.scripts].find((script) => script.type === 'module').src")
        history = json.dumps(module.rpartition("/")[0] + "/history.js")
        browser.run(f"import({history}).then((h) => {{ h.forgetChat(h.loadChats()[0]); window.gone = true; }}); 0")
        browser.until("window.gone")
        answered(browser)
        assert browser.run(stored) == ""
        say(browser, "two")
        answered(browser, 2)
        assert browser.run(stored) == "4" and browser.errors == []


@needs_browser
def test_what_other_pages_and_programs_stored(tmp_path):
    """Each page wrote the list that it had read at its start: the chats of the other one were gone. A chat in a wrong
    shape left the page empty for ever. A question was lost with the page that waited for its answer."""
    engine = FakeEngine(b"word " * 100, delay=0.02, max_model_len=512)
    chats = "tinyserve.chats"
    others = [
        {"id": "x", "title": "of another page", "messages": [{"role": "user", "content": "a"}]},
        *[{"id": "y", "title": "?", "messages": wrong} for wrong in ([{"role": "user"}], [None], [{"content": 1}], "")],
        {"id": "z", "messages": []},
        3,
    ]
    with page_of(engine, tmp_path) as browser:
        browser.until("document.querySelector('#model').options.length")
        browser.run(f"localStorage.setItem('{chats}', {json.dumps(json.dumps(others))})")
        browser.run(f"window.dispatchEvent(new StorageEvent('storage', {{key: '{chats}'}}))")
        assert "of another page" in browser.text("#chats")
        say(browser, "mine")
        browser.until("document.querySelector('.assistant .body')?.innerText.includes('word word')")
        browser.call("Page.reload")
        browser.until("document.querySelectorAll('#chats li').length === 2")
        assert {chat["title"] for chat in json.loads(browser.run(f"localStorage.getItem('{chats}')"))} == {
            "mine", "of another page"
        }  # fmt: skip
        assert browser.text("article.user .body") == "mine" and browser.errors == []


@needs_browser
def test_settings_tokens_and_the_key(tmp_path):
    """Without the key the page asks for it; settings go into the request; each token tells how likely it was."""
    engine = FakeEngine(b"ab!")
    with page_of(engine, tmp_path, api_key=["sesame"]) as browser:
        browser.until("document.querySelector('#settings').open && document.activeElement.id === 'key'")
        browser.type("sesame")
        values = {"system": "Be brief", "temperature": "0.5", "max_tokens": "7", "stop-texts": "END\nSTOP"}
        for name, value in values.items():
            browser.run(f"document.querySelector('#{name}').value = {json.dumps(value)}")
        browser.click("#logprobs")
        browser.click("#settings button[value=close]")
        browser.until("document.querySelector('#model').options.length === 2")
        say(browser, "Hi")
        answered(browser)
        sampling = engine.calls[-1][1]
        assert engine.chats[-1][0][0] == {"role": "system", "content": "Be brief"}
        assert (sampling.temperature, sampling.max_tokens, sampling.stop) == (0.5, 7, ("END", "STOP"))
        browser.click(".token-view")
        labels = browser.run("[...document.querySelectorAll('.tokens button')].map((b) => b.ariaLabel)")
        assert labels[:2] == ['"a", 61 %', '"b", 61 %'] and '"!", 0.00 %' in labels
        browser.run("document.querySelector('.tokens button').focus()")
        assert "61 %" in browser.text("#tip") and not browser.run("document.querySelector('#tip').hidden")
        assert [error for error in browser.errors if "401" not in error] == []


@needs_browser
def test_thoughts_are_folded_and_errors_are_said(tmp_path):
    engine = FakeEngine(b"<think>hm <b>x</b></think>\nDone", max_model_len=300)
    with page_of(engine, tmp_path) as browser:
        say(browser, "Hi")
        answered(browser)
        assert browser.run("document.querySelector('details.thought').open") is False
        assert browser.run("document.querySelector('details.thought .text').textContent") == "hm <b>x</b>"
        assert browser.text(".assistant .body > p") == "Done"
        engine.fail_at = 0
        say(browser, "again")
        answered(browser, 2)
        assert "NaN" in browser.text(".failure") and browser.run("document.querySelector('.failure').role") == "alert"


@needs_browser
def test_it_can_be_used_without_a_mouse_and_read_aloud(tmp_path):
    """Every control has a name, the focus goes through all of them, and the end of an answer is announced."""
    with page_of(FakeEngine(), tmp_path) as browser:
        say(browser, "Hi")
        answered(browser)
        tree = browser.call("Accessibility.getFullAXTree")["nodes"]
        controls = {"button", "textbox", "combobox", "link", "spinbutton", "checkbox"}
        nameless = [
            node for node in tree
            if not node["ignored"] and node["role"]["value"] in controls and not node.get("name", {}).get("value")
        ]  # fmt: skip
        roles = {node["role"]["value"] for node in tree if not node["ignored"]}
        assert nameless == [] and {"log", "navigation", "main", "status"} <= roles
        assert "complete" in browser.run("document.querySelector('#status').textContent")
        visited = set()
        for _ in range(20):
            browser.press("Tab", vk=9)
            visited.add(browser.run("document.activeElement.id || document.activeElement.className"))
        assert {"input", "send", "new", "model", "open-settings", "messages"} <= visited


@needs_browser
def test_the_dashboard_shows_a_live_batch(tmp_path):
    """Over an engine whose look is given: numbers, rows and drawings, and ids that are text only."""
    engine = FakeEngine()
    sequence = SimpleNamespace(id="cmpl-<b>x</b>/1", running=True, prompt=10, known=14, computed=13, blocks=2,
                               started=99.0, arrival=98.0)  # fmt: skip
    steps = [SimpleNamespace(start=95 + n / 10, end=95.05 + n / 10, tokens=8, prompt=8 * (n % 2), sequences=4,
                             generated=4) for n in range(40)]  # fmt: skip
    stats = SimpleNamespace(running=1, waiting=3, preemptions=0, kv_usage=0.25, prefix_hits=1, prefix_queries=4)
    engine.look = lambda **most: SimpleNamespace(
        now=100.0, stats=stats, sequences=[sequence], steps=steps, blocks=bytes([0, 1, 2, 3] * 50), stride=1,
        num_blocks=200, block_size=16,
    )  # fmt: skip
    with page_of(engine, tmp_path, path="/dashboard") as browser:
        browser.until("document.querySelectorAll('#requests tr').length === 1")
        painted = "[...document.querySelectorAll('canvas')].map((c) => c.getContext('2d')" \
            ".getImageData(0, 0, c.width, c.height).data.some((v) => v > 0))"  # fmt: skip

        assert "cmpl-<b>x</b>" in browser.text("#requests td") and "and 3 more" in browser.text("#more")
        assert "25.0 %" in browser.text("#numbers") and browser.run(painted) == [True, True]
        assert "Of 200 blocks 50 are free, 50 are free with a cached prefix" in browser.text("#blocks-text")
        assert "median 50.0 ms" in browser.text("#steps-text")
        assert browser.errors == []
