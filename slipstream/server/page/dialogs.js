// Every dialog closes by its cross and by a click beside it; Escape is the browser's.

export function dialogs() {
  for (const dialog of document.querySelectorAll("dialog")) {
    dialog.querySelector("[data-dismiss]").addEventListener("click", () => dialog.close());
    dialog.addEventListener("click", (event) => event.target === dialog && dialog.close());
  }
}
