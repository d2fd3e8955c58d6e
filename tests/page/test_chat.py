"""Chatting with the fake server: streaming, stopping, several at once, the drafts view, settings, what is kept."""

from __future__ import annotations

import re
from collections.abc import Callable

import pytest
from driving import answer, ask, ask_and_wait, tokens, wait_for_end
from playwright.sync_api import Page, expect
from scripted import Reply, ScriptedServer, pieces_of

TEXT = "One **bold** claim.\n\n- first\n- second\n\n```python\nx = 1\n```\n\nThe end."


def test_an_answer_streams_and_ends_with_its_timings(page: Page, fake: ScriptedServer) -> None:
    reply = fake.replies["Hello"] = Reply(pieces=pieces_of(TEXT), hold_after=4)
    ask(page, "Hello")
    expect(answer(page)).to_contain_text("One bold claim.")
    expect(answer(page)).to_have_attribute("aria-busy", "true")
    expect(answer(page).locator(".timings")).to_contain_text("4 tokens")
    expect(answer(page)).not_to_contain_text("The end.")
    reply.go.set()
    done = wait_for_end(page)
    expect(done.locator("strong")).to_have_text("bold")
    expect(done.locator("li")).to_have_text(["first", "second"])
    expect(done.locator("pre code")).to_have_text("x = 1")
    drafted = reply.timings()["draft_n"]
    accepted = reply.timings()["draft_n_accepted"]
    line = f"41.3 tok/s · {len(reply.pieces)} tokens · {accepted} of {drafted} drafts accepted"
    expect(done.locator(".timings")).to_contain_text(line)
    expect(done.locator(".timings")).to_contain_text("1.60× plain speed")
    first = "First token after 0.05 s · prompt of 20 tokens at 500 tok/s"
    expect(done.locator(".prompt-figures")).to_have_text(first)
    expect(done.locator(".reason")).to_have_text(reply.speculation)
    expect(page.locator("#announcer")).to_contain_text("Answer: One **bold** claim.")
    expect(page).to_have_title("Hello – Slipstream")


def test_an_answer_says_what_came_from_the_cache(page: Page, fake: ScriptedServer) -> None:
    note = "10 tokens after the nearest kept state were read again"
    fake.replies["Again"] = Reply(cached_tokens=1100, cache_note=note)
    shown = ask_and_wait(page, "Again").locator(".prompt-figures")
    words = "First token after 0.05 s · 1,100 of 1,120 prompt tokens from cache · 20 read at 500 tok/s"
    expect(shown).to_have_text(words)
    expect(shown).to_have_attribute("title", note)


def test_thinking_is_folded_away_and_not_sent_back(page: Page, fake: ScriptedServer) -> None:
    reply = fake.replies["Hello"] = Reply(thinking="first this then <b>that</b>", hold_after=0)
    ask(page, "Hello")
    expect(answer(page).locator(".timings")).to_have_text("Thinking…")
    reply.go.set()
    done = wait_for_end(page)
    thinking = done.locator("details.thinking")
    expect(thinking.locator("p")).to_be_hidden()
    thinking.locator("summary").click()
    expect(thinking.locator("p")).to_have_text("first this then <b>that</b> ")
    expect(done.locator(".prose")).to_have_text("A short answer of a few words.")
    page.reload()
    expect(answer(page).locator("details.thinking p")).to_have_text("first this then <b>that</b> ")
    ask_and_wait(page, "plain")
    expect(answer(page).locator("details.thinking")).to_be_hidden()
    assert fake.requests[-1]["messages"][1] == {"role": "assistant", "content": "A short answer of a few words."}


def test_the_request_says_what_the_settings_say(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "plain")
    page.click("#tab-settings")
    page.fill("#system", "Be brief.")
    typed = {
        "temperature": "0.7",
        "top_p": "0.9",
        "top_k": "40",
        "min_p": "0.05",
        "seed": "7",
        "max_tokens": "99",
        "presence_penalty": "-0.5",
        "frequency_penalty": "0.5",
        "repetition_penalty": "1.1",
        "p_min": "0.3",
    }
    for name, value in typed.items():
        page.fill(f"#field-{name}", value)
    page.check("input[name=drafting][value=fixed]", force=True)
    page.fill("#field-depth", "3")
    ask_and_wait(page, "set")
    page.check("input[name=drafting][value=off]", force=True)
    page.fill("#field-top_p", "7")
    expect(page.locator("#field-top_p-problem")).to_have_text("A number from 0.01 to 1.")
    ask_and_wait(page, "off")

    plain, full, off = fake.requests
    assert plain == {
        "messages": [{"role": "user", "content": "plain"}],
        "stream": True,
        "stream_options": {"include_usage": True},
        "return_origins": True,
    }
    assert {name: full[name] for name in typed if name != "p_min"} == {
        name: float(value) for name, value in typed.items() if name != "p_min"
    }
    assert full["speculative"] == {"enabled": True, "depth": 3, "p_min": 0.3}
    assert [m["role"] for m in full["messages"]] == ["system", "user", "assistant", "user"]
    assert full["messages"][0]["content"] == "Be brief."
    assert full["messages"][2]["content"] == "A short answer of a few words."
    assert off["speculative"] == {"enabled": False}
    assert "top_p" not in off


def test_stop_keeps_what_came_and_the_server_sees_the_client_leave(page: Page, fake: ScriptedServer) -> None:
    reply = fake.replies["long"] = Reply(pieces=pieces_of("word " * 50), hold_after=10)
    ask(page, "long")
    expect(answer(page).locator(".timings")).to_contain_text("10 tokens")
    page.click("#stop")
    stopped = wait_for_end(page, "stopped")
    expect(stopped.locator(".notice span")).to_have_text("Stopped by you.")
    expect(stopped.locator(".prose")).to_have_text(re.compile(r"^(word ?){10}$"))
    assert reply.ended.wait(300)
    assert reply.left
    expect(page.locator("#send")).to_be_visible()
    expect(page.locator("#words")).to_be_focused()


def test_escape_stops_and_enter_waits_while_it_streams(page: Page, fake: ScriptedServer) -> None:
    fake.replies["long"] = Reply(hold_after=2)
    ask(page, "long")
    expect(answer(page).locator(".timings")).to_contain_text("2 tokens")
    page.keyboard.type("next")
    page.keyboard.press("Enter")
    expect(page.locator("#words")).to_have_value("next")
    expect(page.locator("article.question")).to_have_count(1)
    page.keyboard.press("Escape")
    wait_for_end(page, "stopped")
    page.keyboard.press("Enter")
    expect(page.locator("article.question")).to_have_count(2)
    wait_for_end(page)


def test_two_conversations_stream_at_once_and_stop_apart(page: Page, fake: ScriptedServer) -> None:
    first = fake.replies["first"] = Reply(pieces=pieces_of("alpha " * 20), hold_after=5)
    second = fake.replies["second"] = Reply(pieces=pieces_of("beta " * 20), hold_after=5)
    ask(page, "first")
    expect(answer(page)).to_contain_text("alpha")
    page.click("#new-chat")
    ask(page, "second")
    expect(answer(page)).to_contain_text("beta")
    expect(page.locator("#thread")).not_to_contain_text("alpha")
    expect(page.locator('#conversations [data-streaming="true"]')).to_have_count(2)

    first.go.set()
    row = page.locator("#conversations li", has_text="first")
    expect(row).to_have_attribute("data-streaming", "false")
    expect(row).to_have_attribute("data-unread", "true")
    expect(page.locator("#announcer")).to_contain_text("An answer is there in “first”.")
    expect(answer(page)).to_have_attribute("data-state", "streaming")
    page.keyboard.press("Escape")
    wait_for_end(page, "stopped")
    assert second.ended.wait(300)
    assert second.left
    assert not first.left

    row.locator(".open").click()
    expect(row).to_have_attribute("data-unread", "false")
    assert wait_for_end(page).locator(".prose").inner_text().count("alpha") == 20


def test_the_drafts_view_tints_every_token_inside_the_markdown(page: Page, fake: ScriptedServer) -> None:
    reply = fake.replies["tint"] = Reply(pieces=pieces_of(TEXT, depth=3), hold_after=6)
    ask(page, "tint")
    page.click("#drafts")
    expect(page.locator("#drafts")).to_have_attribute("aria-checked", "true")
    expect(page.locator("#legend li")).to_have_count(6)
    expect(answer(page).locator(".timings")).to_contain_text("6 tokens")
    expect(answer(page).locator(".token")).not_to_have_count(0)
    reply.go.set()
    done = wait_for_end(page)
    for selector, words in {"strong": "bold", "li": ["first", "second"], "pre code": "x = 1"}.items():
        expect(done.locator(f".prose {selector}")).to_have_text(words)
    shown = tokens(page)
    assert all(
        piece is None or (piece[1] == k and piece[0] in text.replace("*", ""))
        for piece, (text, k) in zip(shown, reply.pieces)
    )
    assert "".join(piece[0] for piece in shown if piece) == "One bold claim.firstsecondx = 1The end."
    code = done.locator("pre .token").evaluate_all("spans => spans.map(s => s.dataset.origin)")
    assert len(set(code)) > 1
    tints = {
        k: done.locator(f'.token[data-tint="{k}"]').first.evaluate("s => getComputedStyle(s).backgroundColor")
        for k in range(3)
    }
    assert len(set(tints.values())) == 3
    own = sum(k == 0 for _, k in reply.pieces)
    expect(done.locator(".share-box .legend li").first).to_have_text(f"model's own token{own}")
    page.keyboard.press("Alt+o")
    expect(done.locator(".token")).to_have_count(0)
    expect(done.locator("strong")).to_have_text("bold")


def test_an_answer_without_origins_says_so(page: Page, fake: ScriptedServer) -> None:
    fake.replies["x"] = Reply(with_origins=False)
    page.click("#drafts")
    done = ask_and_wait(page, "x")
    expect(done.locator(".share-box")).to_have_text("The origins of this answer's tokens are not known.")
    expect(done.locator('.token[data-tint="unknown"]')).to_have_count(len(Reply().pieces))
    expect(done.locator(".prose")).to_have_text("A short answer of a few words.")


def test_model_text_never_becomes_markup(page: Page, fake: ScriptedServer) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\"> <script>document.title='owned'</script> [a](javascript:1)"
    fake.replies["h"] = Reply(pieces=[(hostile, 0)])
    done = ask_and_wait(page, "h")
    for _ in range(2):
        expect(done).to_contain_text("<img src=x onerror=")
        assert done.locator("img, script, a").count() == 0
        page.click("#drafts")
    expect(page).to_have_title("h – Slipstream")


def test_conversations_survive_a_reload(page: Page, fake: ScriptedServer) -> None:
    page.click("#drafts")
    ask_and_wait(page, "Keep me")
    page.fill("#words", "half a thought")
    page.wait_for_function("() => Object.values(localStorage).some(v => v.includes('half a thought'))")
    page.click("#new-chat")
    ask_and_wait(page, "And me")
    page.reload()
    expect(page.locator("#conversations .title")).to_have_text(["And me", "Keep me"])
    page.locator("#conversations .open", has_text="Keep me").click()
    expect(page.locator("#words")).to_have_value("half a thought")
    expect(answer(page).locator(".tinted")).to_have_text("A short answer of a few words.")
    expect(answer(page).locator('.token[data-tint="1"]')).not_to_have_count(0)
    expect(answer(page).locator(".timings")).to_contain_text("41.3 tok/s")


def test_an_answer_cut_by_a_reload_says_so(page: Page, fake: ScriptedServer) -> None:
    fake.replies["cut"] = Reply(hold_after=3)
    ask(page, "cut")
    page.wait_for_function("() => Object.values(localStorage).some(v => v.includes('A short answer'))")
    page.reload()
    expect(answer(page)).to_contain_text("A short answer")
    expect(answer(page).locator(".notice")).to_contain_text("The page was closed while this answer came.")


@pytest.mark.parametrize(
    "stored", ["not json", "[]", "{}", '{"messages": [1, {"role": "x"}, {"role": "assistant", "marks": 3}]}']
)
def test_spoilt_storage_does_not_break_the_page(page: Page, stored: str) -> None:
    page.evaluate("v => localStorage.setItem('slipstream.chat.spoilt', v)", stored)
    page.reload()
    ask_and_wait(page, "still works")


def test_rename_delete_and_undo(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "Old name")
    row = page.locator("#conversations li").first
    row.hover()
    row.get_by_role("button", name="Rename Old name").click()
    page.keyboard.type("New name")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("New name")
    row.get_by_role("button", name="Rename New name").click()
    page.keyboard.type("thrown away")
    page.keyboard.press("Escape")
    expect(row.locator(".title")).to_have_text("New name")
    row.get_by_role("button", name="Delete New name").click()
    expect(page.locator("#empty")).to_be_visible()
    expect(page.locator("#conversations .title")).to_have_text(["New chat"])
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#title")).to_have_text("New name")
    expect(answer(page)).to_contain_text("A short answer")
    page.reload()
    expect(page.locator("#conversations .title")).to_have_text(["New chat", "New name"])


def test_copying(open_page: Callable[..., Page], fake: ScriptedServer) -> None:
    page = open_page(fake.url, permissions=["clipboard-read", "clipboard-write"])
    fake.replies["copy"] = Reply(pieces=pieces_of(TEXT))
    done = ask_and_wait(page, "copy")
    done.get_by_role("button", name="Copy the code").click()
    page.wait_for_function("() => navigator.clipboard.readText().then(t => t === 'x = 1')")
    done.get_by_role("button", name="Copy the answer").click()
    page.wait_for_function("text => navigator.clipboard.readText().then(t => t === text)", arg=TEXT)


def test_the_end_stays_in_sight_unless_the_reader_scrolls_away(page: Page, fake: ScriptedServer) -> None:
    reply = fake.replies["tall"] = Reply(pieces=pieces_of("line\n\n" * 150), hold_after=200)
    at_end = "s => s.scrollHeight - s.scrollTop - s.clientHeight < 80"
    scroller = page.locator("#scroller")
    ask(page, "tall")
    expect(answer(page).locator(".timings")).to_contain_text("200 tokens")
    assert scroller.evaluate(at_end)
    scroller.evaluate("s => { s.scrollTop = 0; }")
    expect(page.locator("#jump")).to_be_visible()
    reply.go.set()
    wait_for_end(page)
    assert scroller.evaluate("s => s.scrollTop") == 0
    page.click("#jump")
    expect(page.locator("#jump")).to_be_hidden()
    assert scroller.evaluate(at_end)


def test_two_tabs_do_not_overwrite_each_other(page: Page, fake: ScriptedServer) -> None:
    other = page.context.new_page()
    other.goto(fake.url)
    other.wait_for_selector("body[data-ready]")
    ask_and_wait(page, "from the first tab")
    other.click("#new-chat")
    ask_and_wait(other, "from the second tab")
    for tab in (page, other):
        expect(tab.locator("#conversations")).to_contain_text("from the first tab")
        expect(tab.locator("#conversations")).to_contain_text("from the second tab")
