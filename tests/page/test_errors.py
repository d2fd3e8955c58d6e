"""Each way a request can fail, as the sentence the reader gets and what is kept."""

from __future__ import annotations

import re

import pytest
from driving import Complaints, answer, ask, ask_and_wait, wait_for_end
from playwright.sync_api import Page, expect
from scripted import Reply, ScriptedServer, pieces_of


def test_a_full_server_says_how_long_to_wait(page: Page, fake: ScriptedServer, complaints: Complaints) -> None:
    complaints.expected = ["429"]
    fake.replies["x"] = Reply(status=429, headers={"Retry-After": "2"}, message="256 requests are waiting already")
    failed = ask_and_wait(page, "x", "failed")
    sentence = "The server is full: 256 requests are waiting already. It asks to wait 2 s."
    expect(failed.locator(".notice span")).to_have_text(sentence)
    button = failed.locator(".notice button")
    expect(button).to_be_disabled()
    del fake.replies["x"]
    expect(button).to_have_text("Try again")
    button.click()
    wait_for_end(page)
    expect(page.locator("article")).to_have_count(2)


@pytest.mark.parametrize(
    ("status", "message", "sentence"),
    [
        (
            400,
            "the prompt has 5000 tokens, the context 2048.",
            "The server refused this request: the prompt has 5000 tokens, the context 2048.",
        ),
        (
            401,
            "no key",
            "The server asks for its API key. Reload this page to enter it.",
        ),
        (503, "draining", "The server takes no requests now: draining."),
        (500, "", "The server failed (500)."),
    ],
)
def test_refusals(
    page: Page, fake: ScriptedServer, complaints: Complaints, status: int, message: str, sentence: str
) -> None:
    complaints.expected = [str(status)]
    fake.replies["x"] = Reply(status=status, message=message)
    failed = ask_and_wait(page, "x", "failed")
    expect(failed.locator(".notice span")).to_have_text(sentence)
    expect(page.locator("#announcer")).to_contain_text(sentence)
    expect(page.locator("article.question")).to_have_text("x")


def test_a_stream_that_breaks_keeps_what_came(page: Page, fake: ScriptedServer) -> None:
    fake.replies["x"] = Reply(pieces=pieces_of("kept words and lost ones"), break_after=2)
    failed = ask_and_wait(page, "x", "failed")
    expect(failed.locator(".prose")).to_have_text("kept words")
    sentence = "The connection broke in the middle of the answer. What had come is kept."
    expect(failed.locator(".notice span")).to_have_text(sentence)
    page.reload()
    expect(answer(page).locator(".prose")).to_have_text("kept words")
    expect(answer(page).locator(".notice span")).to_have_text(sentence)


def test_an_error_in_the_stream_is_shown(page: Page, fake: ScriptedServer) -> None:
    fake.replies["x"] = Reply(pieces=pieces_of("kept words and lost ones"), fail_after=3)
    failed = ask_and_wait(page, "x", "failed")
    expect(failed.locator(".prose")).to_have_text("kept words and")
    expect(failed.locator(".notice span")).to_have_text("The server broke off: the engine failed.")


def test_an_answer_cut_at_its_limit_says_so(page: Page, fake: ScriptedServer) -> None:
    fake.replies["x"] = Reply(finish="length")
    expect(ask_and_wait(page, "x").locator(".notice span")).to_have_text("Cut at the limit of tokens.")


def test_a_server_that_is_gone(page: Page, fake: ScriptedServer, complaints: Complaints) -> None:
    complaints.expected = ["ERR_CONNECTION_REFUSED", "ERR_EMPTY_RESPONSE", "ERR_CONNECTION_RESET"]
    expect(page.locator("#live")).not_to_have_class("stale")
    fake.stop()
    expect(page.locator("#server-error")).to_contain_text("The server does not answer. Is it still running?")
    expect(page.locator(".side-foot [data-field='model.state']")).to_have_text("no connection")
    ask(page, "anyone?")
    failed = wait_for_end(page, "failed")
    expect(failed.locator(".notice span")).to_have_text(
        "The server does not answer. Is it still running? Nothing you wrote is lost."
    )
    expect(failed.get_by_role("button", name="Try again")).to_be_enabled()
    expect(failed.get_by_role("button", name=re.compile("again", re.IGNORECASE))).to_have_count(1)


def test_the_banner_goes_when_the_server_is_back(page: Page, fake: ScriptedServer, complaints: Complaints) -> None:
    complaints.expected = ["401"]
    fake.status_code = 401
    expect(page.locator("#server-error")).to_contain_text("The server asks for its API key.")
    fake.status_code = 200
    expect(page.locator("#server-error")).to_have_text("")
    expect(page.locator(".side-foot [data-field='model.state']")).to_have_text("ready")
