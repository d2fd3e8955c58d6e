"""The page's parsers, imported into a real browser: server-sent events, Markdown, fields, the store's bounds."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from scripted import PAGE

FILES = sorted(PAGE.iterdir())

EVENTS = """async (chunks) => {
  const { serverEvents } = await import("/page/sse.js");
  const bytes = chunks.map((chunk) => new Uint8Array(chunk));
  const body = new ReadableStream({ start(c) { bytes.forEach((b) => c.enqueue(b)); c.close(); } });
  const seen = [];
  for await (const data of serverEvents(body)) seen.push(data);
  return seen;
}"""

MARKDOWN = """async (text) => {
  const { MarkdownBody } = await import("/page/markdown.js");
  const body = new MarkdownBody();
  body.update({ text });
  return body.node.innerHTML.replace(/<button.*?<\\/button>/g, "");
}"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere_and_no_text_becomes_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(", text)
    assert not re.search(r"""(src|href|url|fetch|import)\W{1,3}(https?:)?//""", text)
    if path.suffix == ".html":
        assert not re.search(r"\son\w+=|\sstyle=|<style|<script>", text)


def chunked(raw: bytes, size: int) -> list[list[int]]:
    return [list(raw[i : i + size]) for i in range(0, len(raw), size)]


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_events_survive_any_cut(workbench: Page, size: int, end: str) -> None:
    raw = 'data: {"a": "ü€😀"}\n\n: keep-alive\n\nevent: x\ndata:one\ndata: two\n\ndata: [DONE]\n\nignored: z\n\n'
    # A lone carriage return at the very end waits for its line feed, so one more line follows.
    data = (raw.replace("\n", end) + ":end").encode()
    assert workbench.evaluate(EVENTS, chunked(data, size)) == ['{"a": "ü€😀"}', "one\ntwo", "[DONE]"]


def test_an_event_broken_off_is_dropped(workbench: Page) -> None:
    assert workbench.evaluate(EVENTS, chunked(b"data: whole\n\ndata: hal", 4)) == ["whole"]


@pytest.mark.parametrize(
    ("source", "html"),
    [
        ("plain", "<p>plain</p>"),
        ("one\ntwo", "<p>one<br>two</p>"),
        ("a **bold** and *slanted* b", "<p>a <strong>bold</strong> and <em>slanted</em> b</p>"),
        ("**a `b` c**", "<p><strong>a <code>b</code> c</strong></p>"),
        ("5 * 3 * 2 and snake_case_name", "<p>5 * 3 * 2 and snake_case_name</p>"),
        ("unclosed **bold and `code", "<p>unclosed **bold and `code</p>"),
        (r"\*not\*", "<p>*not*</p>"),
        ("``a ` b``", "<p><code>a ` b</code></p>"),
        ("# Top", "<h3>Top</h3>"),
        ("#hash", "<p>#hash</p>"),
        (
            "- a\n- b\n  - c\n\n1. x\n2. y",
            "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul><ol><li>x</li><li>y</li></ol>",
        ),
        ("3. x\n4. y", '<ol start="3"><li>x</li><li>y</li></ol>'),
        ("> said\n> so", "<blockquote><p>said<br>so</p></blockquote>"),
        ("a\n\n---\n\nb", "<p>a</p><hr><p>b</p>"),
        (
            "[x](https://example.org/a)",
            '<p><a href="https://example.org/a" target="_blank" rel="noopener noreferrer">x</a></p>',
        ),
        ("[x](javascript:alert(1))", "<p>[x](javascript:alert(1))</p>"),
        ("<img src=x onerror=alert(1)>", "<p>&lt;img src=x onerror=alert(1)&gt;</p>"),
    ],
)
def test_markdown(workbench: Page, source: str, html: str) -> None:
    assert workbench.evaluate(MARKDOWN, source) == html


def test_code_keeps_its_text_and_may_be_unfinished(workbench: Page) -> None:
    code = "def f():\n    return '<b>' # **x**"
    for source in (f"```python\n{code}\n```\nafter", f"```python\n{code}"):
        html = workbench.evaluate(MARKDOWN, source)
        assert "<code>def f():\n    return '&lt;b&gt;' # **x**</code></pre>" in html
        assert "<span>python</span>" in html
        assert html.endswith("<p>after</p>") == source.endswith("after")


def test_blocks_above_stay_the_same_nodes(workbench: Page) -> None:
    same = workbench.evaluate(
        """async () => {
          const { MarkdownBody } = await import("/page/markdown.js");
          const body = new MarkdownBody();
          body.update({ text: "first\\n\\nsec" });
          const [first, second] = body.node.children;
          body.update({ text: "first\\n\\nsecond **b** \\n\\n- third" });
          return [body.node.children[0] === first, body.node.children[1] === second, body.node.textContent];
        }"""
    )
    assert same == [True, False, "firstsecond bthird"]


@pytest.mark.parametrize("source", ["**" * 20000, "*a " * 20000, "`" * 30001, "[" * 20000, "> " * 5000, "- " * 5000])
def test_hostile_markdown_ends(workbench: Page, source: str) -> None:
    """No time is asserted: a parser that backtracks would run into the test's own limit."""
    shown = workbench.evaluate(MARKDOWN, source)
    assert len(shown) > 0


def test_fields_say_what_is_wrong(workbench: Page) -> None:
    said: dict[str, Any] = workbench.evaluate(
        """async () => {
          const { SAMPLING, problem } = await import("/page/fields.js");
          const by = Object.fromEntries(SAMPLING.map((f) => [f.name, f]));
          return { empty: problem(by.top_p, ""), good: problem(by.top_p, "0.5"), high: problem(by.top_p, "7"),
                   half: problem(by.top_k, "1.5"), word: problem(by.seed, "x"), nan: problem(by.temperature, "NaN") };
        }"""
    )
    assert said == {
        "empty": "",
        "good": "",
        "high": "A number from 0.01 to 1.",
        "half": "A whole number from 0 to 100000.",
        "word": "A whole number from 0 up.",
        "nan": "A number from 0 to 2.",
    }


def test_the_store_keeps_within_its_bounds(workbench: Page) -> None:
    kept = workbench.evaluate(
        """async () => {
          const store = await import("/page/store.js");
          const dropped = [];
          store.droppedForRoom.listen((title) => dropped.push(title));
          for (let i = 0; i < 70; i += 1) {
            const c = store.create();
            c.title = `chat ${i}`;
            c.messages.push({ role: "user", text: "x".repeat(90000) });
            store.touch(c);
          }
          const big = store.create();
          const text = "y".repeat(1000);
          const reply = { role: "assistant", text, marks: [1000, 0], state: "done" };
          for (let i = 0; i < 500; i += 1) big.messages.push({ role: "user", text }, { ...reply });
          store.touch(big);
          const keys = Object.keys(localStorage).filter((key) => key.startsWith("slipstream.chat."));
          const sizes = keys.map((key) => localStorage[key].length);
          return {
            number: store.all().length,
            first: store.all()[0] === big,
            dropped: dropped[0],
            most: Math.max(...sizes),
            sum: sizes.reduce((a, b) => a + b, 0),
            limits: store.LIMITS,
            last: big.messages.at(-1).text === text,
          };
        }"""
    )
    assert kept["number"] <= kept["limits"]["conversations"]
    assert kept["sum"] <= kept["limits"]["charsInAll"]
    assert kept["most"] <= kept["limits"]["charsEach"]
    assert kept["first"]
    assert kept["last"]
    assert kept["dropped"]
