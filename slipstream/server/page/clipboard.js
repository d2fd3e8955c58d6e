// Copying text. The clipboard API is there only on https and localhost; elsewhere the old command does it.

import { el } from "./dom.js";

export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch {
      // Not allowed here: try the old way.
    }
  }
  const area = el("textarea", { class: "visually-hidden", readonly: true });
  area.value = text;
  document.body.append(area);
  area.select();
  const copied = document.execCommand("copy");
  area.remove();
  return copied;
}

/** What a copy button does: copy, and show for a moment that it did. */
export async function copyFrom(button, text) {
  if (!(await copyText(text))) return;
  button.classList.add("done");
  setTimeout(() => button.classList.remove("done"), 1200);
}
