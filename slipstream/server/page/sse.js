// Server-sent events from a fetch body. Knows no JSON and no protocol above the events.

// A carriage return at the very end may be half of CRLF: it waits for what follows.
const LINE_END = /\r\n|\n|\r(?=[^\n])/;

/** Yields the data of each event. Comments (keep-alives) are dropped, and so is an event the stream broke off in. */
export async function* serverEvents(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  let data = [];
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const lines = (rest + value).split(LINE_END);
      rest = lines.pop();
      for (const line of lines) {
        if (line === "") {
          if (data.length) yield data.join("\n");
          data = [];
        } else if (line.startsWith("data:")) {
          data.push(line.slice(line[5] === " " ? 6 : 5));
        }
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
