"""The page's parsers, imported into a real browser: server-sent events, Markdown, fields, the store's bounds."""

from __future__ import annotations

import re
from html import unescape
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Page
from scripted import PAGE

FILES = sorted(path for path in PAGE.iterdir() if path.is_file())

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

# What is shown with the drafts view on, as [text, origin, the tags it stands in].
TINTED = """async ([text, marks]) => {
  const { MarkdownBody } = await import("/page/markdown.js");
  const body = new MarkdownBody(true);
  body.update({ text, marks });
  const tags = (node) => node === body.node ? [] : [...tags(node.parentElement), node.tagName.toLowerCase()];
  return [...body.node.querySelectorAll(".token")].map((token) =>
    [token.textContent, Number(token.dataset.origin), tags(token.parentElement).join(" ")]);
}"""


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_nothing_is_fetched_from_elsewhere_and_no_text_becomes_markup(path: Path) -> None:
    text = path.read_text().replace("http://www.w3.org/2000/svg", "")
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|\beval\(", text)
    assert not re.search(
        r"\.render|highlightElement|highlightAll|\.value\b.*hljs|initHighlighting", text
    )  # HTML of libraries
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
        ("[x](data:text/html,a)", "<p>[x](data:text/html,a)</p>"),
        (
            "![eye](https://example.org/a.png)",
            '<p><a href="https://example.org/a.png" target="_blank" rel="noopener noreferrer">eye</a></p>',
        ),
        ("![eye](data:image/png;base64,AA)", "<p>![eye](data:image/png;base64,AA)</p>"),
        (
            "see https://example.org, ok",
            '<p>see <a href="https://example.org/" target="_blank" rel="noopener noreferrer">https://example.org</a>'
            ", ok</p>",
        ),
        (
            "| a | b |\n|---|--:|\n| 1 | `2` |",
            '<div class="table-box" tabindex="0" role="region" aria-label="Table"><table><thead><tr><th>a</th>'
            '<th data-align="right">b</th></tr></thead><tbody><tr><td>1</td><td data-align="right"><code>2</code></td>'
            "</tr></tbody></table></div>",
        ),
    ],
)
def test_markdown(workbench: Page, source: str, html: str) -> None:
    assert workbench.evaluate(MARKDOWN, source) == html


def test_code_keeps_its_text_and_may_be_unfinished(workbench: Page) -> None:
    code = "def f():\n    return '<b>' # **x**"
    for source in (f"```python\n{code}\n```\nafter", f"```python\n{code}"):
        html = workbench.evaluate(MARKDOWN, source)
        shown = unescape(re.sub(r"<[^>]*>", "", html[html.index("<code>") : html.index("</code>")]))
        assert shown == code
        assert '<span class="hl-keyword">def</span>' in html
        assert """<span class="hl-string">'&lt;b&gt;'</span>""" in html
        assert "<span>python</span>" in html
        assert html.endswith("<p>after</p>") == source.endswith("after")


@pytest.mark.parametrize("language", ["html", "javascript", "markdown", "php", "diff", "no-such-language", ""])
def test_coloured_code_is_the_same_text(workbench: Page, language: str) -> None:
    code = "<script>\n  let a = `${1}`; // <b>\n</script>\n+ <?php echo 1; ?>\n# *x*\n"
    shown = workbench.evaluate(
        """async ([code, language]) => {
          const { coloured } = await import("/page/code.js");
          return coloured(code, language).map((node) => node.textContent ?? node).join("");
        }""",
        [code, language],
    )
    assert shown == code


def marked(pieces: list[tuple[str, int]]) -> list[Any]:
    return ["".join(text for text, _ in pieces), [part for text, k in pieces for part in (len(text), k)]]


@pytest.mark.parametrize(
    ("pieces", "shown"),
    [
        ([("One ", 0), ("**bo", 1), ("ld**", 2)], [["One ", 0, "p"], ["bo", 1, "p strong"], ["ld", 2, "p strong"]]),
        ([("# ", 0), ("To", 1), ("p", 2)], [["To", 1, "h3"], ["p", 2, "h3"]]),
        ([("a", 0), (" \\*", 1), (" &amp; b", 2)], [["a", 0], [" ", 1], ["*", 1], [" ", 2], ["&", 2], [" b", 2]]),
        (
            [("1. 1", 0), ("\n2.", 1), (" 2\n", 2), ("   - 2", 3)],
            [["1", 0, "ol li"], ["2", 2, "ol li"], ["2", 3, "ol li ul li"]],
        ),
        (
            [("> a\n", 0), ("> ```py\n> ", 1), ("x = ", 2), ("1\n> y", 3), ("\n> ```", 4)],
            [["a", 0, "blockquote p"], ["x = ", 2], ["1\n", 3], ["y", 3]],
        ),
        ([("| a | a |\n|-|-|\n", 0), ("| a ", 1), ("| a |", 2)], [["a", 0], ["a", 0], ["a", 1], ["a", 2]]),
        ([("[a", 0), ("](https://a.b/)", 1), (" a `a", 2), ("\na`", 3)], [["a", 0], [" a ", 2], ["a", 2], [" a", 3]]),
        ([("a\r\n", 0), ("b\r", 1), ("c", 2)], [["a", 0], ["b", 1], ["c", 2]]),
    ],
)
def test_tints_find_their_text_inside_markdown(
    workbench: Page, pieces: list[tuple[str, int]], shown: list[list[Any]]
) -> None:
    found = workbench.evaluate(TINTED, marked(pieces))
    assert [each[: len(want)] for each, want in zip(found, shown)] == shown
    assert len(found) == len(shown)


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
          const { add, path } = await import("/page/tree.js");
          const dropped = [];
          store.droppedForRoom.listen((title) => dropped.push(title));
          for (let i = 0; i < 70; i += 1) {
            const c = store.create();
            c.title = `chat ${i}`;
            add(c, null, { role: "user", text: "x".repeat(90000) });
            store.touch(c);
          }
          const big = store.create();
          const text = "y".repeat(1000);
          const reply = { role: "assistant", text, marks: [1000, 0], state: "done" };
          const first = add(big, null, { role: "user", text });
          for (let i = 0; i < 5; i += 1) add(big, first, { ...reply });
          for (let i = 0; i < 500; i += 1) {
            add(big, path(big).at(-1), { role: "user", text });
            add(big, path(big).at(-1), { ...reply });
          }
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
            last: path(big).at(-1) === big.messages.at(-1) && big.messages.at(-1).text === text,
            starts: path(big)[0].role,
            branches: big.messages.length - path(big).length,
          };
        }"""
    )
    assert kept["number"] <= kept["limits"]["conversations"]
    assert kept["sum"] <= kept["limits"]["charsInAll"]
    assert kept["most"] <= kept["limits"]["charsEach"]
    assert kept["first"]
    assert kept["last"]
    assert kept["starts"] == "user"
    assert kept["branches"] == 0
    assert kept["dropped"]
