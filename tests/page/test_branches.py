"""Messages as a tree: other wordings, other answers, continuing, deleting, and what older pages have stored."""

from __future__ import annotations

import json
from typing import Any

import pytest
from driving import Complaints, answer, ask, ask_and_wait, source, wait_for_end
from playwright.sync_api import Locator, Page, expect
from scripted import Reply, ScriptedServer, pieces_of

TREE = """async (calls) => {
  const tree = await import("/page/tree.js");
  const conversation = { messages: [], chosen: {} };
  for (const [name, ...args] of calls) {
    const by = (id) => tree.find(conversation, id);
    if (name === "add") tree.add(conversation, by(args[0]), { role: args[1], text: args[2] });
    else tree[name](conversation, by(args[0]));
  }
  return tree.path(conversation).map((message) => message.text);
}"""
TWO_ANSWERS = [["add", 0, "user", "q"], ["add", 1, "assistant", "a"], ["add", 1, "assistant", "b"]]
FOLLOWED = [*TWO_ANSWERS, ["add", 3, "user", "r"], ["add", 4, "assistant", "s"]]


def question(page: Page, index: int = -1) -> Locator:
    articles = page.locator("article.question")
    return articles.last if index == -1 else articles.nth(index)


@pytest.mark.parametrize(
    ("calls", "shown"),
    [
        (TWO_ANSWERS, ["q", "b"]),
        ([*TWO_ANSWERS, ["choose", 2]], ["q", "a"]),
        (FOLLOWED, ["q", "b", "r", "s"]),
        ([*FOLLOWED, ["choose", 2]], ["q", "a"]),
        ([*FOLLOWED, ["choose", 2], ["choose", 3]], ["q", "b", "r", "s"]),
        ([*FOLLOWED, ["remove", 3]], ["q", "a"]),
        ([*FOLLOWED, ["remove", 4]], ["q", "b", "s"]),
        ([*FOLLOWED, ["remove", 5]], ["q", "b", "r"]),
        ([*FOLLOWED, ["choose", 2], ["remove", 1]], ["a"]),
        ([*FOLLOWED, ["remove", 1], ["remove", 2]], ["b", "r", "s"]),
    ],
)
def test_the_path_that_is_shown(workbench: Page, calls: list[Any], shown: list[str]) -> None:
    assert workbench.evaluate(TREE, calls) == shown


def test_another_answer_stands_beside_the_old_one(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "once")
    expect(answer(page).locator(".branches")).to_be_hidden()
    fake.replies["once"] = Reply(pieces=pieces_of("Something else."))
    page.get_by_role("button", name="Answer again").click()
    expect(answer(page)).to_contain_text("Something else.")
    wait_for_end(page)
    expect(page.locator("article.answer")).to_have_count(1)
    expect(answer(page).locator(".branches")).to_have_text("2 / 2")
    expect(answer(page).get_by_role("button", name="Next version")).to_be_disabled()
    answer(page).get_by_role("button", name="Previous version").click()
    expect(answer(page).locator(".prose")).to_have_text("A short answer of a few words.")
    expect(answer(page).get_by_role("button", name="Next version")).to_be_focused()
    ask_and_wait(page, "on")
    said = [[message["content"] for message in request["messages"]] for request in fake.requests]
    assert said == [["once"], ["once"], ["once", "A short answer of a few words.", "on"]]
    page.reload()
    expect(answer(page, 0).locator(".branches")).to_have_text("1 / 2")
    answer(page, 0).get_by_role("button", name="Next version").click()
    expect(page.locator("article")).to_have_count(2)
    expect(answer(page)).to_contain_text("Something else.")


def test_a_question_is_edited_and_the_old_one_stays(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "first")
    fake.replies["second"] = Reply(pieces=pieces_of("Better."))
    question(page).hover()
    page.get_by_role("button", name="Edit and send again").click()
    box = page.get_by_label("Edit the question")
    expect(box).to_be_focused()
    expect(box).to_have_value("first")
    page.keyboard.press("Escape")
    expect(question(page).locator(".said")).to_have_text("first")
    page.get_by_role("button", name="Edit and send again").press("Enter")
    box.fill("second")
    page.keyboard.press("Enter")
    expect(question(page).locator(".said")).to_have_text("second")
    expect(answer(page).locator(".prose")).to_have_text("Better.")
    wait_for_end(page)
    expect(page.locator("article")).to_have_count(2)
    expect(question(page).locator(".branches")).to_have_text("2 / 2")
    assert [message["content"] for message in fake.requests[-1]["messages"]] == ["second"]
    question(page).get_by_role("button", name="Previous version").click()
    expect(question(page).locator(".said")).to_have_text("first")
    expect(answer(page).locator(".prose")).to_have_text("A short answer of a few words.")


def test_a_cut_answer_is_continued(page: Page, fake: ScriptedServer) -> None:
    fake.replies["story"] = Reply(pieces=pieces_of("Once upon a"), finish="length")
    done = ask_and_wait(page, "story")
    fake.replies["story"] = Reply(pieces=[(" time", 1), (" it", 2), (" ended.", 0)])
    done.get_by_role("button", name="Continue").click()
    expect(done.locator(".prose")).to_have_text("Once upon a time it ended.")
    wait_for_end(page)
    expect(done.get_by_role("button", name="Continue")).to_have_count(0)
    expect(done.locator(".timings")).to_contain_text("3.0 tok/s · 6 tokens")  # 3 + 3 in a second each
    assert source(page) == "Once upon a time it ended."
    request = fake.requests[-1]
    assert request["messages"] == [
        {"role": "user", "content": "story"},
        {"role": "assistant", "content": "Once upon a"},
    ]
    assert request["continue_final_message"] is True
    assert request["add_generation_prompt"] is False
    assert "continue_final_message" not in fake.requests[0]


def test_a_stopped_answer_is_continued_but_only_as_the_last_one(page: Page, fake: ScriptedServer) -> None:
    fake.replies["long"] = Reply(pieces=pieces_of("word " * 50), hold_after=10)
    ask(page, "long")
    expect(answer(page).locator(".timings")).to_contain_text("10 tokens")
    page.click("#stop")
    stopped = wait_for_end(page, "stopped")
    expect(stopped.get_by_role("button", name="Continue")).to_be_visible()
    ask_and_wait(page, "next")
    expect(answer(page, 0).get_by_role("button", name="Continue")).to_be_hidden()


def test_one_message_is_deleted_and_put_back(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "one")
    ask_and_wait(page, "two")
    question(page, 1).hover()
    question(page, 1).get_by_role("button", name="Delete the question").click()
    expect(page.locator("article")).to_have_count(3)
    page.get_by_role("button", name="Undo").click()
    expect(page.locator("article.question .said")).to_have_text(["one", "two"])
    answer(page, 0).get_by_role("button", name="Delete the answer").click()
    expect(page.locator("article")).to_have_count(3)
    ask_and_wait(page, "three")
    expect(page.get_by_role("button", name="Undo")).to_have_count(0)
    roles = [message["role"] for message in fake.requests[-1]["messages"]]
    assert roles == ["user", "assistant", "user"], "questions in a row are sent as one"
    assert fake.requests[-1]["messages"][0]["content"] == "one\n\ntwo"
    page.reload()
    expect(page.locator("article")).to_have_count(5)


def test_deleting_one_of_two_answers_shows_the_other(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "once")
    fake.replies["once"] = Reply(pieces=pieces_of("Something else."))
    page.get_by_role("button", name="Answer again").click()
    expect(answer(page)).to_contain_text("Something else.")
    wait_for_end(page)
    ask_and_wait(page, "and then")
    answer(page, 0).get_by_role("button", name="Delete the answer").click()
    expect(page.locator(".note")).to_contain_text("This version and what followed it are deleted.")
    expect(page.locator("article")).to_have_count(2)
    expect(answer(page).locator(".prose")).to_have_text("A short answer of a few words.")
    expect(answer(page).locator(".branches")).to_be_hidden()


def test_nothing_is_changed_while_an_answer_comes(page: Page, fake: ScriptedServer) -> None:
    ask_and_wait(page, "one")
    reply = fake.replies["two"] = Reply(hold_after=2)
    ask(page, "two")
    expect(answer(page).locator(".timings")).to_contain_text("2 tokens")
    expect(page.locator("#thread .at-rest:visible")).to_have_count(0)
    reply.go.set()
    wait_for_end(page)
    expect(page.get_by_role("button", name="Answer again")).to_have_count(2)


def put(page: Page, stored: dict[str, Any]) -> None:
    page.evaluate("v => localStorage.setItem('slipstream.chat.old', v)", json.dumps({"updated": 1e15, **stored}))
    page.evaluate("() => localStorage.setItem('slipstream.current', 'old')")
    page.reload()
    page.wait_for_selector("body[data-ready]")


def test_a_conversation_of_an_older_page_is_read_as_one_path(page: Page, fake: ScriptedServer) -> None:
    done = {"role": "assistant", "text": "hi", "marks": [2, 1], "state": "done", "finish": "stop"}
    messages = [
        {"role": "user", "text": "hello"},
        done,
        {"role": "user", "text": "more"},
        {**done, "state": "streaming"},
    ]
    put(page, {"title": "Old", "system": "Be.", "settings": {"seed": 3}, "unsent": "x", "messages": messages})
    expect(page.locator("#title")).to_have_text("Old")
    expect(page.locator("article.question .said")).to_have_text(["hello", "more"])
    expect(answer(page).locator(".notice")).to_contain_text("The page was closed while this answer came.")
    page.click("#drafts")
    expect(answer(page, 0).locator('.token[data-tint="1"]')).to_have_text("hi")
    page.get_by_role("button", name="Try again").click()
    wait_for_end(page)
    expect(answer(page).locator(".branches")).to_have_text("2 / 2")
    sent = fake.requests[-1]
    assert [message["content"] for message in sent["messages"]] == ["Be.", "hello", "hi", "more"]
    assert sent["seed"] == 3


@pytest.mark.parametrize(
    "ids",
    [[(1, 2), (2, 1)], [(1, 0), (1, 0)], [(2, 1), (3, 2)], [(1, 0), ("x", 1)], [(5, 5), (6, 5)], [(0, 0), (1, 0)]],
)
def test_a_spoilt_tree_becomes_one_path(workbench: Page, ids: list[tuple[Any, int]]) -> None:
    messages = [{"text": text, "id": i, "parent": p} for text, (i, p) in zip("ab", ids)]
    shown = workbench.evaluate(
        """async (messages) => {
          const { path, restoreTree } = await import("/page/tree.js");
          return path(restoreTree(messages, { 0: 99, 1: "y" })).map((message) => message.text);
        }""",
        messages,
    )
    assert shown == ["a", "b"]


def test_a_failed_answer_with_nothing_in_it_leaves_no_branch(
    page: Page, fake: ScriptedServer, complaints: Complaints
) -> None:
    complaints.expected = ["503"]
    fake.replies["x"] = Reply(status=503)
    ask(page, "x")
    wait_for_end(page, "failed")
    del fake.replies["x"]
    page.get_by_role("button", name="Try again").click()
    wait_for_end(page)
    expect(answer(page).locator(".branches")).to_be_hidden()
