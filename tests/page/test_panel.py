"""The live panel shows what /v1/status says, and says what it cannot show."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from driving import answer, ask, ask_and_wait, field
from playwright.sync_api import Page, expect
from scripted import Reply, ScriptedServer


def test_every_number_of_the_status_is_shown(page: Page, fake: ScriptedServer) -> None:
    expect(field(page, "load.waiting")).to_have_text("0")
    fake.status["load"].update(running=3, waiting=2, tokens_per_second=123.4, generated_tokens=98765)
    fake.status["memory"].update(kv_blocks_used=256)
    expect(field(page, "load.tokens_per_second")).to_have_text("123")
    shown = {
        "load.running": "3",
        "load.max_streams": "16",
        "load.waiting": "2",
        "load.generated_tokens": "98,765",
        "load.top": "peak 123 in two minutes",
        "speculation.words": "Drafting 2 tokens ahead.",
        "speculation.reason": fake.status["speculation"]["reason"],
        "speculation.mean": "2.37",
        "speculation.accepted": "700 of 1,100",
        "position.1.percent": "76 %",
        "position.2.counts": "220 / 400",
        "position.3.percent": "50 %",
        "memory.tokens_used": "4,096",
        "memory.tokens": "8,192",
        "memory.rss_bytes": "700 MiB",
        "memory.weight_bytes": "93.5 MiB",
        "device.note": "CPU, own kernels, 2 threads",
        "version": "Slipstream 0.1.0, up for 1 h 2 min",
    }
    for name, words in shown.items():
        expect(field(page, name)).to_have_text(words)
    page.click(".tuning summary")
    expect(page.locator("#positions li:visible")).to_have_count(3)
    fake.status["load"]["generated_tokens"] = 12_345_678
    expect(field(page, "load.generated_tokens")).to_have_text("12.3M")
    expect(page.locator("#kv-meter")).to_have_css("width", half_of(page))
    expect(page.locator("#state-part")).to_be_hidden()


def test_a_server_that_sleeps_says_how_it_wakes(page: Page, fake: ScriptedServer) -> None:
    state = page.locator(".side-foot [data-field='model.state']")
    for name, words in (("sleeping", "asleep, the next question wakes it"), ("waking", "loading the model again")):
        fake.status["state"] = name
        expect(state).to_have_text(words)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "Prefix cache: 83 % of prompt tokens found."),
        ({"states_used": 12, "states_total": 37}, "Prefix cache: 83 % of prompt tokens found, 12 states."),
        ({"queried_tokens": 0, "states_total": 37}, "Prefix cache: no prompt so far, 0 states."),
        ({"enabled": False}, "Prefix cache: off."),
    ],
)
def test_the_prefix_cache_in_words(page: Page, fake: ScriptedServer, changes: dict[str, int], words: str) -> None:
    fake.status["prefix_cache"].update(changes)
    expect(field(page, "prefix_cache.words")).to_have_text(words)


def half_of(page: Page) -> str:
    width = page.locator(".meter").evaluate("track => track.clientWidth")
    return f"{width / 2:g}px"


def test_tokens_a_step_include_plain_steps(page: Page, fake: ScriptedServer) -> None:
    """Where the status has only the counts: 2,100 tokens in 500 drafting and 900 plain steps of a row."""
    del fake.status["speculation"]["tokens_per_step"]
    fake.status["speculation"]["plain_row_steps"] = 900
    fake.status["load"]["generated_tokens"] = 2100
    expect(field(page, "speculation.mean")).to_have_text("1.50")


@pytest.mark.parametrize(
    ("policy", "running", "depth", "words"),
    [
        ("adaptive", 1, 0, "Not drafting now: a plain step is faster."),
        ("adaptive", 1, 1, "Drafting 1 token ahead."),
        ("adaptive", 0, 0, "Idle. Drafts up to 4 tokens ahead where that pays."),
        ("solo", 2, 0, "Not drafting now: several streams are running."),
        ("off", 1, 0, "Drafting is off by the server’s settings."),
    ],
)
def test_drafting_in_words(workbench: Page, policy: str, running: int, depth: int, words: str) -> None:
    state = {"available": True, "policy": policy, "depth": depth, "max_depth": 4}
    said = workbench.evaluate(
        "async ([s, load]) => (await import('/page/panel.js')).draftingWords(s, load)", [state, {"running": running}]
    )
    assert said == words


def test_a_stream_of_this_page_goes_by_its_title_and_shows_its_gain(page: Page, fake: ScriptedServer) -> None:
    expect(field(page, "own.words")).to_have_text("Ask something to see what drafts bring.")
    reply = fake.replies["My question"] = Reply(hold_after=3, gain=1.25)
    ask(page, "My question")
    expect(answer(page).locator(".timings")).to_contain_text("3 tokens")
    row = {"prompt_tokens": 9, "tokens_per_second": 41.2, "depth": 2, "draft_tokens": 50, "accepted_tokens": 25}
    fake.status["streams"] = [
        {"id": "r1", "request_id": "other", "state": "prefill", "generated": 0, **row, "draft_tokens": 0},
        {"id": "r2", "request_id": fake.request_ids[0], "state": "decode", "generated": 88, "gain": 1.6, **row},
        {"id": "r3", "request_id": None, "state": "decode", "generated": 1, **row, "draft_tokens": 0},
    ]
    expect(page.locator("#streams .name")).to_have_text(["another client", "My question", "another client"])
    expect(page.locator("#streams .speed")).to_have_text(["reading its prompt", "41.2 tok/s", "41.2 tok/s"])
    details = ["0 tokens · no drafts", "88 tokens · 50 % of drafts accepted · 1.60× plain", "1 token · no drafts"]
    expect(page.locator("#streams .detail")).to_have_text(details)
    expect(field(page, "own.gain")).to_have_text("1.60×")
    expect(field(page, "own.words")).to_have_text("41.2 tokens/s right now.")
    fake.status["streams"] = []
    reply.go.set()
    expect(page.locator("#no-streams")).to_be_visible()
    expect(field(page, "own.gain")).to_have_text("1.25×")
    expect(field(page, "own.words")).to_have_text("41.3 tokens/s in the last answer.")
    page.click("#new-chat")
    expect(field(page, "own.gain")).to_have_text("–")


def test_memory_is_seen_without_scrolling(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    page = open_page(fake.url, viewport={"width": 1360, "height": 900})
    ask_and_wait(page, "x")
    expect(field(page, "memory.rss_bytes")).to_have_text("700 MiB")
    expect(field(page, "memory.rss_bytes")).to_be_in_viewport(ratio=1)


def test_a_model_without_a_head_says_why_it_does_not_draft(page: Page, fake: ScriptedServer) -> None:
    why = "this checkpoint has no MTP head"
    nothing = {"drafted_per_position": [], "accepted_per_position": [], "draft_tokens": 0, "accepted_tokens": 0}
    fake.status["speculation"].update(available=False, why_not=why, max_depth=0, depth=0, **nothing)
    expect(field(page, "speculation.words")).to_have_text(f"No drafting: {why}")
    page.click(".tuning summary")
    expect(page.locator("#no-drafts")).to_be_visible()
    page.click("#tab-settings")
    expect(page.locator("#draft-note")).to_have_text(f"Drafting is not available: {why}")


def test_the_sparkline_follows_the_speed(page: Page, fake: ScriptedServer) -> None:
    fake.status["load"]["tokens_per_second"] = 50.0
    line = page.locator(".spark-line")
    page.wait_for_function("() => document.querySelector('.spark-line').getAttribute('points').split(' ').length > 2")
    ys = [float(point.split(",")[1]) for point in (line.get_attribute("points") or "").split(" ")]
    assert min(ys) == 4.0  # the peak touches the top
    assert all(4.0 <= y <= 46.0 for y in ys)
