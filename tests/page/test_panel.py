"""The live panel shows what /v1/status says, and says what it cannot show."""

from __future__ import annotations

import pytest
from driving import answer, ask, field
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
        "speculation.depth": "2",
        "speculation.of": "tokens ahead · adaptive, at most 4",
        "speculation.reason": fake.status["speculation"]["reason"],
        "speculation.mean": "2.40",
        "speculation.accepted": "700 of 1,100",
        "position.1.percent": "76 %",
        "position.2.counts": "220 / 400",
        "position.3.percent": "50 %",
        "memory.kv_blocks_used": "256",
        "memory.kv_blocks_total": "512",
        "memory.rss_bytes": "700 MiB",
        "memory.weight_bytes": "93.5 MiB",
        "device.note": "CPU, own kernels, 2 threads",
        "version": "Slipstream 0.1.0, up for 1 h 2 min",
    }
    for name, words in shown.items():
        expect(field(page, name)).to_have_text(words)
    expect(page.locator("#positions li:visible")).to_have_count(3)
    fake.status["load"]["generated_tokens"] = 12_345_678
    expect(field(page, "load.generated_tokens")).to_have_text("12.3M")
    expect(page.locator("#kv-meter")).to_have_css("width", half_of(page))
    expect(page.locator("#state-row")).to_be_hidden()


def half_of(page: Page) -> str:
    width = page.locator(".meter").evaluate("track => track.clientWidth")
    return f"{width / 2:g}px"


@pytest.mark.parametrize("stream", ["chatcmpl-1", "1"])
def test_a_stream_of_this_page_goes_by_its_title(page: Page, fake: ScriptedServer, stream: str) -> None:
    reply = fake.replies["My question"] = Reply(hold_after=3)
    ask(page, "My question")
    expect(answer(page).locator(".timings")).to_contain_text("3 tokens")
    row = {"prompt_tokens": 9, "tokens_per_second": 41.2, "depth": 2, "draft_tokens": 50, "accepted_tokens": 25}
    fake.status["streams"] = [
        {"id": stream, "state": "decode", "generated": 88, **row},
        {"id": "chatcmpl-zzabcdef", "state": "prefill", "generated": 0, **row, "draft_tokens": 0},
    ]
    expect(page.locator("#streams .name")).to_have_text(["My question", "stream zzabcdef"])
    expect(page.locator("#streams .speed")).to_have_text(["41.2 tok/s", "prefill"])
    expect(page.locator("#streams .detail").first).to_have_text("88 tokens · depth 2, 50 % accepted")
    reply.go.set()
    fake.status["streams"] = []
    expect(page.locator("#no-streams")).to_be_visible()


def test_a_model_without_a_head_says_why_it_does_not_draft(page: Page, fake: ScriptedServer) -> None:
    why = "this checkpoint has no MTP head"
    nothing = {"drafted_per_position": [], "accepted_per_position": [], "draft_tokens": 0, "accepted_tokens": 0}
    fake.status["speculation"].update(available=False, why_not=why, max_depth=0, depth=0, **nothing)
    expect(field(page, "speculation.depth")).to_have_text("off")
    expect(field(page, "speculation.reason")).to_have_text(why)
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
