"""A real Chromium for the page's tests, a page that fails the test on any console error, and the fake server."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parent.parent / "server")]

from driving import Complaints  # noqa: E402
from playwright.sync_api import Browser, Page, expect, sync_playwright  # noqa: E402
from scripted import ScriptedServer  # noqa: E402

PATIENCE_MS = 60_000  # a busy machine may be slow; nothing waits this long where all is well
expect.set_options(timeout=PATIENCE_MS)
NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


# Per module: while playwright's loop runs in this thread, tests that are coroutines could not.
@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    executable = next((path for name in NAMES if (path := shutil.which(name))), None)
    if executable is None:
        pytest.skip("the page needs a Chromium on the PATH: Debian's package chromium")
    with sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=executable, args=["--disable-dev-shm-usage"])
        yield started
        started.close()


@pytest.fixture
def fake() -> Iterator[ScriptedServer]:
    server = ScriptedServer().start()
    yield server
    if server.thread.is_alive():
        server.stop()


@pytest.fixture(scope="module")
def workbench(browser: Browser) -> Iterator[Page]:
    """One page for a whole module of tests that only import the page's modules."""
    server = ScriptedServer().start()
    page = browser.new_page()
    page.goto(server.url)
    yield page
    page.close()
    server.stop()


@pytest.fixture
def complaints() -> Iterator[Complaints]:
    kept = Complaints()
    yield kept
    assert kept.unexpected == []


@pytest.fixture
def open_page(browser: Browser, complaints: Complaints, fake: ScriptedServer) -> Iterator[Callable[..., Page]]:
    """Opens a page in a fresh profile; keywords are those of a browser context (viewport, color_scheme...).

    Asks for the fake server so that its pages are closed before that one goes.
    """
    contexts = []

    def open_at(url: str, **options: Any) -> Page:
        page = new_page(browser, **options)
        contexts.append(page.context)
        complaints.watch(page)
        show(page, url)
        return page

    yield open_at
    for context in contexts:
        context.close()


@pytest.fixture(scope="module")
def kept_page(browser: Browser) -> Iterator[Page]:
    page = new_page(browser)
    yield page
    page.context.close()


@pytest.fixture
def page(kept_page: Page, complaints: Complaints, fake: ScriptedServer) -> Iterator[Page]:
    """As fresh as a profile: a browser keeps what a page stores by origin, and each fake server has a port of its own.

    To open one in a process that has shown others takes a third of the time.
    """
    tools = kept_page.context.new_cdp_session(kept_page)
    tools.send("Storage.clearDataForOrigin", {"origin": fake.url, "storageTypes": "all"})  # a port may come back
    tools.detach()
    complaints.watch(kept_page)
    show(kept_page, fake.url)
    yield kept_page
    complaints.leave(kept_page)
    for other in kept_page.context.pages:
        if other is not kept_page:
            other.close()
    kept_page.goto("about:blank")


def new_page(browser: Browser, **options: Any) -> Page:
    context = browser.new_context(**{"viewport": {"width": 1360, "height": 860}, **options})
    context.set_default_timeout(PATIENCE_MS)
    return context.new_page()


def show(page: Page, url: str) -> None:
    page.goto(url)
    page.wait_for_selector("body[data-ready]")
