"""The page against `slipstream serve` on the default model: what it shows is what the server says and counts."""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest
from driving import Complaints, answer, ask, ask_and_wait, field, source, tokens, wait_for_end
from playwright.sync_api import Browser, Page, expect
from prometheus_client.parser import text_string_to_metric_families
from real_server import RealServer

# Two that the default model does not come to an end with, so that a test is never late for them.
BREAD = "Write a detailed guide to baking bread in fifty steps."
ANIMALS = "Write a list of one hundred animals, one on each line."
ENDLESS = 3500
FRANCE = "What is the capital of France?"
CYCLING = "Why do cyclists ride close behind each other?"
WAIT_MS = 300_000


pytestmark = pytest.mark.first


@pytest.fixture(scope="module")
def real(browser: Browser) -> Iterator[RealServer]:  # without a browser there is nothing to start it for
    with RealServer("--draft", "3", "--max-context", "4096", "--max-streams", "4") as server:
        yield server


@pytest.fixture
def chat(open_page: Callable[..., Page], real: RealServer) -> Page:
    return greedy(open_page(real.url))


def greedy(page: Page, max_tokens: int = 48) -> Page:
    """Temperature 0 and a short answer, set where a reader would set them."""
    page.keyboard.press("Alt+,")
    page.fill("#field-temperature", "0")
    page.fill("#field-max_tokens", str(max_tokens))
    page.keyboard.press("Escape")
    return page


def alone(real: RealServer, words: str, max_tokens: int = 48) -> Any:
    """The same question through the API, whole and by itself."""
    messages = [{"role": "user", "content": words}]
    asked = {"messages": messages, "temperature": 0, "max_tokens": max_tokens, "return_origins": True}
    response = real.post("/v1/chat/completions", **asked)
    assert response.status_code == 200
    return response.json()


def origins(page: Page) -> set[int]:
    return {piece[1] for piece in tokens(page) if piece is not None}


MODEL_LABELS = ("model_name", "engine")


def metrics(real: RealServer) -> dict[str, float]:
    """Each sample by its name, with the value of its only label, besides the model's, where it has one."""
    text = httpx.get(f"{real.url}/metrics", timeout=300).text
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    others = [[value for label, value in sample.labels.items() if label not in MODEL_LABELS] for sample in samples]
    return {" ".join([sample.name, *values]): sample.value for sample, values in zip(samples, others, strict=True)}


def number(page: Page, name: str) -> float:
    return float(field(page, name).inner_text().replace(",", ""))


def wait_until_idle(real: RealServer) -> dict[str, Any]:
    for _ in range(3000):
        status = real.status()
        if status["load"]["running"] == status["load"]["waiting"] == status["memory"]["kv_blocks_used"] == 0:
            return status
        time.sleep(0.1)
    raise AssertionError(status)


def test_an_answer_and_the_origins_of_its_tokens(chat: Page, real: RealServer) -> None:
    expected = alone(real, FRANCE)
    chat.click("#drafts")
    done = ask_and_wait(chat, FRANCE)
    choice = expected["choices"][0]
    assert source(chat) == choice["message"]["content"]
    shown = tokens(chat)
    assert len(shown) == len(choice["origins"])
    for piece, (text, origin) in zip(shown, choice["origins"]):
        assert piece is None or (piece[1] == origin and piece[0] in text)
    assert origins(chat) >= {0, 1}
    timings = expected["timings"]
    expect(done.locator(".timings")).to_contain_text(f"{timings['predicted_n']} tokens")
    drafts = f"{timings['draft_n_accepted']} of {timings['draft_n']} drafts accepted"
    expect(done.locator(".timings")).to_contain_text(drafts)
    expect(done.locator(".timings")).to_contain_text("tok/s")
    expect(done.locator(".reason")).not_to_have_text("")
    expect(done.locator(".prompt-figures")).to_have_text(
        re.compile(r"^First token after [\d.]+ s · (prompt of \d+ tokens|\d+ of \d+ prompt tokens from cache)")
    )
    expect(field(chat, "own.gain")).to_have_text(re.compile(r"^\d+\.\d+×$"))


def test_without_speculation_every_token_is_the_models_own_and_the_text_is_the_same(
    chat: Page, real: RealServer
) -> None:
    expected = alone(real, FRANCE)["choices"][0]["message"]["content"]
    chat.check("input[name=drafting][value=off]", force=True)
    chat.click("#drafts")
    done = ask_and_wait(chat, FRANCE)
    assert source(chat) == expected
    assert origins(chat) == {0}
    expect(done.locator(".timings")).to_contain_text("no drafts")
    expect(done.locator(".reason")).not_to_have_text("")


def test_a_cut_answer_goes_on_as_if_it_had_not_been_cut(chat: Page, real: RealServer) -> None:
    expected = alone(real, BREAD, 48)["choices"][0]["message"]["content"]
    greedy(chat, 24)
    done = ask_and_wait(chat, BREAD)
    cut = source(chat)
    assert expected.startswith(cut)
    done.get_by_role("button", name="Continue").click()
    expect(done.locator(".timings")).to_contain_text("48 tokens")
    wait_for_end(chat)
    assert source(chat)[: len(expected)] == expected[: len(source(chat))]
    assert len(source(chat)) > len(cut)


def test_stop_ends_the_work_on_the_server(chat: Page, real: RealServer) -> None:
    before = wait_until_idle(real)["load"]["requests"]["abort"]
    greedy(chat, ENDLESS)
    ask(chat, BREAD)
    expect(answer(chat).locator(".timings")).to_contain_text("tok/s", timeout=WAIT_MS)
    chat.click("#stop")
    stopped = wait_for_end(chat, "stopped")
    assert stopped.locator(".prose").inner_text().strip()
    after = wait_until_idle(real)
    assert after["load"]["requests"]["abort"] == before + 1
    expect(field(chat, "load.running")).to_have_text("0")


def test_two_conversations_stream_at_once_each_with_its_own_text(chat: Page, real: RealServer) -> None:
    expected = {words: alone(real, words)["choices"][0]["message"]["content"] for words in (BREAD, ANIMALS)}
    greedy(chat, ENDLESS)
    chat.click("#drafts")
    chat.click("#tab-live")
    ask(chat, BREAD)
    chat.click("#new-chat")  # starts with the same settings
    ask(chat, ANIMALS)
    expect(field(chat, "load.running")).to_have_text("2", timeout=WAIT_MS)
    names = [re.compile(rf"^{words[:20]}") for words in (BREAD, ANIMALS)]
    expect(chat.locator("#streams .name")).to_have_text(names)
    expect(chat.locator('#conversations [data-streaming="true"]')).to_have_count(2)
    for words in (BREAD, ANIMALS):
        chat.locator("#conversations .open", has_text=words[:20]).click()
        # A fast machine is at "1,024 tokens" by now.
        so_far = "document.querySelector('.answer:last-child .timings').textContent.split(' ')[0]"
        has_come = f"n => Number({so_far}.replaceAll(',', '')) >= n"
        chat.wait_for_function(has_come, arg=48, timeout=WAIT_MS)
        chat.keyboard.press("Escape")
        wait_for_end(chat, "stopped")
        assert source(chat).startswith(expected[words])
    wait_until_idle(real)


def test_the_panel_says_what_metrics_say(chat: Page, real: RealServer) -> None:
    ask_and_wait(chat, CYCLING)
    wait_until_idle(real)
    chat.click("#tab-live")
    counted = metrics(real)
    generated = counted["vllm:generation_tokens_total"]
    expect(field(chat, "load.generated_tokens")).to_have_text(f"{generated:,.0f}")
    accepted = counted["vllm:spec_decode_num_accepted_tokens_total"]
    drafted = counted["vllm:spec_decode_num_draft_tokens_total"]
    expect(field(chat, "speculation.accepted")).to_have_text(f"{accepted:,.0f} of {drafted:,.0f}")
    mean = generated / (counted["vllm:spec_decode_num_drafts_total"] + counted["slipstream_plain_row_steps_total"])
    assert abs(number(chat, "speculation.mean") - mean) <= 0.0056  # rounded to thousandths, then to hundredths
    assert accepted > 0
    for position in (1, 2, 3):
        by_position = counted[f"vllm:spec_decode_num_accepted_tokens_per_pos_total {position - 1}"]
        expect(field(chat, f"position.{position}.counts")).to_have_text(re.compile(rf"^{by_position:,.0f} / "))
    assert number(chat, "load.running") == counted["vllm:num_requests_running"] == 0
    assert number(chat, "load.waiting") == counted["vllm:num_requests_waiting"] == 0
    assert number(chat, "memory.tokens_used") == counted["slipstream_kv_blocks_used"] == 0
    block_size = real.status()["memory"]["block_size"]
    assert number(chat, "memory.tokens") == block_size * counted["slipstream_kv_blocks"]


def test_a_prompt_that_is_too_long_is_explained(chat: Page, complaints: Complaints) -> None:
    complaints.expected = ["400"]
    failed = ask_and_wait(chat, "word " * 6000, "failed")
    expect(failed.locator(".notice span")).to_have_text(re.compile(r"^The server refused this request: .*4096"))


def test_a_phone(open_page: Callable[..., Page], real: RealServer) -> None:
    page = open_page(real.url, viewport={"width": 320, "height": 640}, has_touch=True, is_mobile=True)
    greedy(page)
    expect(page.locator("#panel")).to_be_hidden()
    page.tap("#drafts")
    ask_and_wait(page, FRANCE)
    assert origins(page) >= {0, 1}
    assert page.evaluate("() => document.scrollingElement.scrollWidth") == 320
    page.tap(".top [data-open=panel]")
    page.tap("#tab-live")
    expect(field(page, "load.running")).to_be_visible()


def test_a_page_behind_a_key(open_page: Callable[..., Page], browser: Browser) -> None:
    with RealServer("--api-key", "open sesame", "--draft", "2", "--max-context", "512", "--max-streams", "2") as server:
        plain = browser.new_page()
        response = plain.goto(server.url)
        assert response is not None
        assert response.status == 401
        plain.close()
        page = open_page(f"{server.url}/?key=open+sesame")
        assert page.url == f"{server.url}/"
        greedy(page)
        ask_and_wait(page, FRANCE)
        page.reload()
        expect(answer(page)).to_have_attribute("data-state", "done")
        page.close()  # before the server goes, or it would complain
