"""What stands around the chat: search, files, presets, export and import, the context meter, defaults."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from driving import answer, ask_and_wait, wait_for_end
from playwright.sync_api import Page, expect
from scripted import Reply, ScriptedServer, pieces_of


def test_search_finds_titles_and_words_inside(page: Page, fake: ScriptedServer) -> None:
    fake.replies["trees"] = Reply(pieces=pieces_of("The old OAK stands in the middle of the village."))
    for words in ("trees", "houses", "boats"):
        ask_and_wait(page, words)
        page.click("#new-chat")
    titles = page.locator("#conversations li:visible .title")
    expect(titles).to_have_count(4)
    page.keyboard.press("Alt+s")
    expect(page.locator("#search")).to_be_focused()
    page.keyboard.type("HOUSE")
    expect(titles).to_have_text(["houses"])
    page.fill("#search", "oak")
    expect(titles).to_have_text(["trees"])
    expect(page.locator("#conversations .snippet:visible")).to_contain_text("The old OAK stands in")
    page.fill("#search", "nowhere")
    expect(page.locator("#no-match")).to_be_visible()
    page.keyboard.press("Escape")
    expect(titles).to_have_count(4)
    page.fill("#search", "oak")
    page.keyboard.press("Enter")
    expect(page.locator("#title")).to_have_text("trees")
    expect(page.locator("#search")).to_have_value("")


def test_a_text_file_becomes_a_fenced_block(page: Page, fake: ScriptedServer, tmp_path: Path) -> None:
    code = 'print("```")\r\n' + "x = 1\n" * 20
    (tmp_path / "tool.py").write_bytes(code.encode())
    page.fill("#words", "What does this do?")
    page.set_input_files("#file", tmp_path / "tool.py")
    expect(page.locator("#words")).to_be_focused()
    block = 'tool.py\n````py\nprint("```")\n' + "x = 1\n" * 20 + "````"
    expect(page.locator("#words")).to_have_value(f"What does this do?\n\n{block}\n")
    page.press("#words", "Enter")
    expect(page.locator(".question .folded summary")).to_have_text("21 lines")
    expect(page.locator(".question .said > p")).to_contain_text("What does this do?")
    page.click(".question .folded summary")
    expect(page.locator(".question pre")).to_contain_text("x = 1")
    expect(page.locator(".question .hl-number").first).to_have_text("1")
    assert fake.requests[-1]["messages"][-1]["content"] == f"What does this do?\n\n{block}"


def test_other_files_are_refused_with_a_sentence(page: Page, tmp_path: Path) -> None:
    no_text = "“a.bin” is not a text file: only text can be attached."
    refusals = [
        (b"\x89PNG\r\n\x1a\n\x00\x00", no_text),
        (b"text\x00text", no_text),
        (b"\xff\xfe\x00a", no_text),
        (b"x" * 1_200_000, "“a.bin” has 1200 kB: there is room for 199 kB here."),
        (b"x" * 200_100, "“a.bin” has 200 kB: there is room for 199 kB here."),
    ]
    for content, words in refusals:
        (tmp_path / "a.bin").write_bytes(content)
        page.set_input_files("#file", tmp_path / "a.bin")
        expect(page.locator(".note span")).to_have_text(words)
        page.get_by_role("button", name="Close the note").click()
        expect(page.locator("#words")).to_have_value("")


def test_presets_are_saved_chosen_and_deleted(page: Page, fake: ScriptedServer) -> None:
    page.click("#tab-settings")
    expect(page.get_by_label("Preset", exact=True)).to_have_value("")
    page.fill("#system", "Speak like a pirate.")
    page.fill("#field-temperature", "0.9")
    page.fill("#preset-name", "Pirate")
    page.click("#save-preset")
    expect(page.locator("#preset")).to_have_value("Pirate")
    page.fill("#field-temperature", "1")
    expect(page.locator("#preset")).to_have_value("")
    page.fill("#preset-name", "Wild")
    page.press("#preset-name", "Enter")
    page.reload()
    page.click("#reset-settings")
    expect(page.locator("#system")).to_have_value("")
    expect(page.locator("#preset option")).to_have_text(["None", "Pirate", "Wild"])
    page.select_option("#preset", "Pirate")
    expect(page.locator("#system")).to_have_value("Speak like a pirate.")
    ask_and_wait(page, "hello")
    assert fake.requests[-1]["temperature"] == 0.9
    assert fake.requests[-1]["messages"][0] == {"role": "system", "content": "Speak like a pirate."}
    page.get_by_role("button", name="Delete the preset").click()
    expect(page.locator("#preset option")).to_have_text(["None", "Wild"])
    expect(page.locator("#system")).to_have_value("Speak like a pirate.")
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("#preset")).to_have_value("Pirate")


def exported(page: Page, button: str) -> tuple[str, str]:
    page.click("#transfer-button")
    with page.expect_download() as download:
        page.click(button)
    expect(page.locator("#transfer")).to_be_hidden()
    return download.value.suggested_filename, download.value.path().read_text()


def test_export_and_import(page: Page, fake: ScriptedServer, tmp_path: Path) -> None:
    fake.replies["Which one?"] = Reply(pieces=pieces_of("The *first*."))
    ask_and_wait(page, "Which one?")
    page.get_by_role("button", name="Answer again").click()
    expect(answer(page).locator(".branches")).to_have_text("2 / 2")
    wait_for_end(page)
    name, text = exported(page, "#export-markdown")
    assert name == "Which-one.md"
    assert text == "# Which one?\n\n## You\n\nWhich one?\n\n## Answer\n\nThe *first*.\n"
    page.click("#new-chat")
    ask_and_wait(page, "Another")
    name, one = exported(page, "#export-json")
    assert name == "Another.json"
    assert [each["title"] for each in json.loads(one)["conversations"]] == ["Another"]
    name, everything = exported(page, "#export-all")
    assert name == "conversations.json"
    assert [each["title"] for each in json.loads(everything)["conversations"]] == ["Another", "Which one?"]

    page.evaluate("() => localStorage.clear()")
    page.reload()
    expect(page.locator("#conversations .title")).to_have_text(["New chat"])
    (tmp_path / "all.json").write_text(everything)
    page.set_input_files("#import-file", tmp_path / "all.json")
    expect(page.locator(".note span")).to_have_text("2 conversations imported.")
    expect(page.locator("#conversations .title")).to_have_text(["Another", "Which one?", "New chat"])
    page.locator("#conversations .open", has_text="Which one?").click()
    expect(answer(page).locator(".branches")).to_have_text("2 / 2")
    page.click("#drafts")
    expect(answer(page).locator('.token[data-tint="1"]')).not_to_have_count(0)


def test_a_file_that_is_no_export_says_so(page: Page, tmp_path: Path) -> None:
    for content in ("no json", "{}", '{"conversations": 3}', '[1, {"messages": []}, {"messages": 3}]'):
        (tmp_path / "x.json").write_text(content)
        page.set_input_files("#import-file", tmp_path / "x.json")
        expect(page.locator(".note span")).to_have_text("“x.json” has no conversations that this page can read.")
        page.get_by_role("button", name="Close the note").click()


def test_what_is_imported_is_data(page: Page, tmp_path: Path) -> None:
    hostile = "<img src=x onerror=\"document.title='owned'\">"
    messages: list[Any] = [
        {"role": "user", "text": hostile},
        {"role": "assistant", "text": hostile, "state": hostile, "notice": {"a": 1}, "timings": 5, "usage": [hostile]},
    ]
    (tmp_path / "x.json").write_text(
        json.dumps([{"title": hostile, "messages": messages, "settings": {"seed": hostile}}])
    )
    page.set_input_files("#import-file", tmp_path / "x.json")
    expect(page.locator("#title")).to_have_text(hostile)
    expect(answer(page)).to_contain_text("<img src=x")
    assert page.locator("img").count() == 0


def test_the_context_meter_and_the_servers_defaults(page: Page, fake: ScriptedServer) -> None:
    expect(page.locator("#context")).to_be_hidden()
    expect(page.locator("#settings-summary")).to_have_text("temperature 0.2")
    ask_and_wait(page, "x")
    used = 20 + len(Reply().pieces)
    expect(page.locator("#context")).to_contain_text(f"{used} of 2,048")
    expect(page.locator("#context")).to_have_attribute("data-full", "false")
    fake.status["model"]["context"] = used + 1
    expect(page.locator("#context")).to_have_attribute("data-full", "true")
    page.reload()
    expect(page.locator("#context")).to_contain_text(f"{used} of {used + 1}")
    page.click("#tab-settings")
    expect(page.locator("#field-temperature")).to_have_attribute("placeholder", "0.2")
    expect(page.locator("#field-top_k")).to_have_attribute("placeholder", "default")
    page.check("input[name=drafting][value=off]", force=True)
    expect(page.locator("#settings-summary")).to_have_text("temperature 0.2 · no drafts")
    page.click("#new-chat")
    expect(page.locator("#context")).to_be_hidden()
