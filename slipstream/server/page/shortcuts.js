// Keys that work anywhere on the page. `code` and not `key`: with Alt held, some layouts type another letter.

/** `actions`: what each key does; `escape` returns whether it used the key. */
export function shortcuts(actions) {
  const byCode = {
    KeyN: actions.newChat,
    ArrowUp: () => actions.neighbour(-1),
    ArrowDown: () => actions.neighbour(1),
    KeyO: actions.drafts,
    KeyP: actions.panel,
    Comma: actions.settings,
    Slash: actions.help,
    KeyS: actions.search,
    KeyA: actions.attach,
  };
  document.addEventListener("keydown", (event) => {
    if (event.isComposing) return;
    if (event.key === "Escape" && !document.querySelector("dialog[open]")) {
      if (actions.escape()) event.preventDefault();
      return;
    }
    if (!event.altKey || event.ctrlKey || event.metaKey || !(event.code in byCode)) return;
    event.preventDefault();
    byCode[event.code]();
  });
}
