"""What the tests do over and over: ask, wait for an end, read what is shown, and hear the browser complain."""

from __future__ import annotations

from typing import Any

from playwright.sync_api import ConsoleMessage, Error, Locator, Page, expect


def ask(page: Page, words: str) -> None:
    page.fill("#words", words)
    page.press("#words", "Enter")


def answer(page: Page, index: int = -1) -> Locator:
    articles = page.locator("article.answer")
    return articles.last if index == -1 else articles.nth(index)


def wait_for_end(page: Page, state: str = "done") -> Locator:
    last = answer(page)
    expect(last).to_have_attribute("data-state", state, timeout=120_000)
    return last


def ask_and_wait(page: Page, words: str, state: str = "done") -> Locator:
    ask(page, words)
    expect(page.locator("article.question").last).to_have_text(words)
    return wait_for_end(page, state)


def tokens(page: Page) -> list[list[Any] | None]:
    """The last answer's tokens as the drafts view shows them: [text, origin]; markup is left out of the text."""
    shown: list[list[Any] | None] = answer(page).evaluate(
        """article => {
          const pieces = [];
          for (const { textContent, dataset } of article.querySelectorAll(".token")) {
            pieces[dataset.piece] ??= ["", Number(dataset.origin)];
            pieces[dataset.piece][0] += textContent;
          }
          return [...pieces].map((piece) => piece ?? null);
        }"""
    )
    return shown


def source(page: Page) -> str:
    """The last answer's text as the model wrote it."""
    text: str = page.evaluate(
        """async () => {
          const store = await import("/page/store.js");
          const { path } = await import("/page/tree.js");
          return path(store.get(localStorage["slipstream.current"])).at(-1).text;
        }"""
    )
    return text


def field(page: Page, name: str) -> Locator:
    return page.locator(f'#live [data-field="{name}"]')


class Complaints:
    """What the browser complained about. A test that provokes a complaint names a part of it in `expected`."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.expected: list[str] = []

    def watch(self, page: Page) -> None:
        page.on("pageerror", self.uncaught)
        page.on("console", self.console)

    def leave(self, page: Page) -> None:
        page.remove_listener("pageerror", self.uncaught)
        page.remove_listener("console", self.console)

    def uncaught(self, error: Error) -> None:
        self.seen.append(f"uncaught: {error}")

    def console(self, message: ConsoleMessage) -> None:
        if message.type in ("error", "warning"):
            self.seen.append(f"{message.type}: {message.text} ({message.location.get('url')})")

    @property
    def unexpected(self) -> list[str]:
        return [words for words in self.seen if not any(part in words for part in self.expected)]
