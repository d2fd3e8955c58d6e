// Short words to the reader: a note that may carry a button, and lines for screen readers only.

import { byId, el, iconButton } from "./dom.js";

/** Said by screen readers, seen by nobody: the end of an answer, not each of its tokens. */
export function announce(words) {
  byId("announcer").textContent = words;
}

/** A note at the bottom; it stays until it is closed or another one takes its place. Returns what closes it. */
export function note(words, action = null) {
  const close = () => shown.remove();
  const act = () => {
    close();
    action.run();
  };
  const button = action && el("button", { type: "button", class: "small", onclick: act }, action.label);
  const closer = iconButton("close", "Close the note", close);
  const shown = el("div", { class: "note" }, el("span", {}, words), button, closer);
  byId("note").replaceChildren(shown);
  return close;
}
