"""How the page looks and handles: contrast, tints for colour-blind eyes, phone widths, keyboard, motion."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from colour_sight import BLINDNESS, oklab
from driving import Complaints, answer, ask, ask_and_wait
from playwright.sync_api import Page, expect
from scripted import Reply, ScriptedServer, pieces_of

COLOURS = (Path(__file__).parent / "colours.js").read_text().strip().removesuffix(";")
TEXT = """Words, **bold** and `code`.

> quoted

```python
x = 1  # a rather long line of code that will not fit a phone
```

- [link](https://example.org)"""
PHONES = [320, 375, 430]


def custom(page: Page, name: str) -> list[float]:
    colour: list[float] = page.evaluate(f"name => {COLOURS}.custom(name)", name)
    return colour


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_has_the_contrast_wcag_asks_for(
    open_page: Callable[..., Page], fake: ScriptedServer, complaints: Complaints, scheme: str
) -> None:
    page = open_page(fake.url, color_scheme=scheme, reduced_motion="reduce")
    low = f"() => {COLOURS}.lowContrast()"
    assert page.evaluate(low) == []
    complaints.expected = ["429"]
    fake.replies["text"] = Reply(pieces=pieces_of(TEXT, depth=5), finish="length")
    fake.replies["full"] = Reply(status=429, headers={"Retry-After": "30"})
    ask_and_wait(page, "text")
    assert page.evaluate(low) == []
    page.click("#drafts")
    expect(page.locator('.token[data-tint="5"]')).not_to_have_count(0)
    assert page.evaluate(low) == []
    ask_and_wait(page, "full", "failed")
    page.click("#tab-settings")
    page.fill("#field-top_p", "9")
    page.keyboard.press("Alt+/")
    assert page.evaluate(low) == []


def test_the_contrast_audit_can_fail(page: Page) -> None:
    page.evaluate("() => { document.getElementById('title').style.color = '#888'; }")
    page.evaluate("() => { document.getElementById('title').style.backgroundColor = '#999'; }")
    assert len(page.evaluate(f"() => {COLOURS}.lowContrast()")) == 1


@pytest.mark.each_value
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("blindness", BLINDNESS)
def test_tints_stay_apart_for_colour_blind_eyes(
    open_page: Callable[..., Page], fake: ScriptedServer, scheme: str, blindness: str
) -> None:
    """Neighbouring tints, the paper first: apart by twice what is just seen in OKLab (0.02), in order of lightness."""
    page = open_page(fake.url, color_scheme=scheme)
    for family in ("tint", "bar"):
        names = (["paper"] if family == "tint" else []) + [f"{family}-{k}" for k in range(1, 6)]
        seen = [oklab(custom(page, name), BLINDNESS[blindness]) for name in names]
        for (a, b), near in zip(pairwise(seen), names):
            assert np.linalg.norm(a - b) > 0.04, near
        steps = np.diff([lab[0] for lab in seen])
        assert (steps < 0).all() or (steps > 0).all(), f"{family}: {steps}"


def overflow(page: Page) -> Any:
    return page.evaluate(
        """() => [...document.querySelectorAll("body *")]
          .filter((n) => n.checkVisibility() && !n.closest("pre, .visually-hidden, .skip, svg"))
          .filter((n) => n.getBoundingClientRect().right > innerWidth + 1 || n.getBoundingClientRect().left < -1)
          .map((n) => `${n.tagName}.${n.className}#${n.id}`)"""
    )


@pytest.mark.parametrize("width", PHONES)
def test_a_phone_shows_everything_without_sideways_scrolling(
    open_page: Callable[..., Page], fake: ScriptedServer, width: int
) -> None:
    page = open_page(fake.url, viewport={"width": width, "height": 640}, has_touch=True, is_mobile=True)
    fake.replies["text"] = Reply(pieces=pieces_of(TEXT + "\n\n" + "x" * 200))
    assert overflow(page) == []
    ask_and_wait(page, "text")
    assert overflow(page) == []
    page.tap("#drafts")
    assert overflow(page) == []
    assert page.evaluate("() => document.scrollingElement.scrollWidth") <= width

    page.tap(".top [data-open=panel]")
    expect(page.locator("#panel")).to_be_visible()
    assert overflow(page) == []
    page.tap("#tab-settings")
    assert overflow(page) == []
    page.tap("#panel [data-close]")
    expect(page.locator("#panel")).to_be_hidden()
    page.tap(".top [data-open=sidebar]")
    expect(page.locator("#conversations li")).to_be_visible()
    assert overflow(page) == []
    page.touchscreen.tap(width - 5, 300)
    expect(page.locator("#sidebar")).to_be_hidden()


def test_what_is_tapped_is_large_enough(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    """WCAG 2.2 AA asks for 24 by 24 CSS pixels."""
    page = open_page(fake.url, viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    ask_and_wait(page, "text")
    page.tap(".top [data-open=sidebar]")
    small = page.evaluate(
        """() => [...document.querySelectorAll("button, input, textarea")].filter((n) => n.checkVisibility())
          .map((n) => [n.id || n.className, n.getBoundingClientRect()]).filter(([, r]) => r.width < 24 || r.height < 24)
          .map(([name]) => name)"""
    )
    assert small == []


def test_a_drawer_keeps_the_focus_and_gives_it_back(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    page = open_page(fake.url, viewport={"width": 1000, "height": 700})
    opener = page.locator(".top [data-open=panel]")
    opener.focus()
    page.keyboard.press("Enter")
    expect(page.locator("#panel [data-close]")).to_be_focused()
    expect(opener).to_have_attribute("aria-expanded", "true")
    inert = "() => ['sidebar', 'main', 'panel'].map((id) => document.getElementById(id).inert)"
    assert page.evaluate(inert) == [True, True, False]
    page.keyboard.press("Escape")
    expect(opener).to_be_focused()
    expect(page.locator("#panel")).to_be_hidden()
    assert page.evaluate(inert) == [False, False, True]


def test_the_columns_fold_and_remember_it(page: Page) -> None:
    expect(page.locator("#panel")).to_be_visible()
    page.keyboard.press("Alt+p")
    expect(page.locator("#panel")).to_be_hidden()
    page.click(".top [data-open=sidebar]")
    expect(page.locator("#sidebar")).to_be_hidden()
    expect(page.locator("#new-chat-top")).to_be_visible()
    page.reload()
    expect(page.locator("#words")).to_be_visible()
    expect(page.locator("#panel")).to_be_hidden()
    expect(page.locator("#sidebar")).to_be_hidden()


def test_the_keyboard_reaches_everything_in_order_with_a_visible_focus(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "first")
    page.focus(".skip")
    seen = []
    for _ in range(60):
        page.keyboard.press("Tab")
        if page.evaluate("() => document.activeElement === document.body"):
            break  # past the end
        name, outlined = page.evaluate(
            """() => { const n = document.activeElement; const s = getComputedStyle(n);
                 const box = n.id === "words" ? getComputedStyle(n.form).boxShadow !== "none" : false;
                 const name = n.id || n.getAttribute("aria-label") || n.textContent.trim();
                 return [name, s.outlineStyle !== "none" || box]; }"""
        )
        assert outlined, name
        seen.append(name)
    order = [
        "new-chat",
        "search",
        "theme",
        "drafts",
        "Copy the answer",
        "Answer again",
        "words",
        "attach",
        "settings-button",
        "tab-live",
        "live",
    ]
    assert [name for name in seen if name in order] == order
    page.focus(".skip")
    page.keyboard.press("Enter")
    expect(page.locator("#words")).to_be_focused()


def test_shortcuts(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "one")
    page.keyboard.press("Alt+n")
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#words")).to_be_focused()
    ask_and_wait(page, "two")
    page.keyboard.press("Alt+ArrowDown")
    expect(page.locator("#title")).to_have_text("one")
    page.keyboard.press("Alt+ArrowUp")
    expect(page.locator("#title")).to_have_text("two")
    page.keyboard.press("Alt+,")
    expect(page.locator("#tab-settings")).to_be_focused()
    page.keyboard.press("ArrowLeft")
    expect(page.locator("#live")).to_be_visible()
    page.keyboard.press("Alt+/")
    expect(page.locator("#shortcuts")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("#shortcuts")).to_be_hidden()
    page.focus("#words")
    page.keyboard.type("a")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("b")
    expect(page.locator("#words")).to_have_value("a\nb")


def test_the_theme_switch_overrides_the_system_and_is_remembered(
    open_page: Callable[..., Page], fake: ScriptedServer
) -> None:
    page = open_page(fake.url, color_scheme="light")
    paper = "() => getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(paper)
    page.emulate_media(color_scheme="dark")
    dark = page.evaluate(paper)
    assert light != dark
    page.click("#theme")
    expect(page.locator("#theme")).to_have_attribute("aria-label", "Theme: light")
    assert page.evaluate(paper) == light
    page.reload()
    assert page.evaluate(paper) == light
    page.click("#theme")
    page.emulate_media(color_scheme="light")
    assert page.evaluate(paper) == dark


def test_nothing_moves_where_motion_is_unwanted(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    reply = fake.replies["slow"] = Reply(hold_after=3)
    counting = "() => document.getAnimations().length"
    page = open_page(fake.url)
    ask(page, "slow")
    expect(answer(page).locator(".timings")).to_contain_text("3 tokens")
    assert page.evaluate(counting) > 0
    page.emulate_media(reduced_motion="reduce")
    assert page.evaluate(counting) == 0
    reply.go.set()


def test_a_key_in_the_address_does_not_stay_there(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    page = open_page(f"{fake.url}/?key=secret")
    assert page.url == f"{fake.url}/"
