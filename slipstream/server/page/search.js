// Finding words in conversations: in titles and in every message, shown or not.

const SNIPPET_BEFORE = 24;
const SNIPPET_AFTER = 60;

/** Null where the words do not occur; else a few words around the first place, or "" where the title has them. */
export function match(conversation, words) {
  const wanted = words.trim().toLowerCase();
  if (conversation.title.toLowerCase().includes(wanted)) return "";
  for (const { text } of conversation.messages) {
    const at = text.toLowerCase().indexOf(wanted);
    if (at < 0) continue;
    const start = Math.max(0, at - SNIPPET_BEFORE);
    const cut = text.slice(start, at + wanted.length + SNIPPET_AFTER).replace(/\s+/g, " ");
    return `${start > 0 ? "…" : ""}${cut}`;
  }
  return null;
}
