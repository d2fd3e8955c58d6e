// Text files for a message: read in the browser, put into the words as a fenced block.

import hljs from "./vendor/highlight.js";

/** Why a file cannot be used, for the reader. */
export class Unusable extends Error {}

const kilobytes = (n) => `${Math.max(1, Math.floor(n / 1000))} kB`;

/** The file as a block for a message with room for so many characters. */
export async function fencedFile(file, room) {
  const name = file.name.replace(/[\r\n`]/g, " ");
  const tooLong = new Unusable(`“${name}” has ${kilobytes(file.size)}: there is room for ${kilobytes(room)} here.`);
  if (file.size > 4 * room) throw tooLong; // no character has more than 4 bytes
  const block = fenced(name, decoded(name, await file.arrayBuffer()));
  if (block.length > room) throw tooLong;
  return block;
}

function decoded(name, bytes) {
  const wrong = new Unusable(`“${name}” is not a text file: only text can be attached.`);
  try {
    const text = new TextDecoder("utf-8", { fatal: true }).decode(bytes);
    if (text.includes("\0")) throw wrong;
    return text.replace(/\r\n?/g, "\n").replace(/\n+$/, "");
  } catch {
    throw wrong;
  }
}

/** The fence is longer than any in the text. */
function fenced(name, text) {
  const ticks = Math.max(2, ...[...text.matchAll(/`+/g)].map(([run]) => run.length)) + 1;
  const ending = name.includes(".") ? name.split(".").at(-1).toLowerCase() : "";
  const language = hljs.getLanguage(ending) ? ending : "";
  const fence = "`".repeat(ticks);
  return `${name}\n${fence}${language}\n${text}\n${fence}\n`;
}
