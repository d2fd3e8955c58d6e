"""What the tests do over and over: ask, wait for an end, read what is shown."""

from __future__ import annotations

from playwright.sync_api import Locator, Page, expect


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


def field(page: Page, name: str) -> Locator:
    return page.locator(f'#live [data-field="{name}"]')
