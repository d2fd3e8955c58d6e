// Answers on their way: one per conversation, any number of conversations at once. Knows no view.

import { chatChunks, ServerError } from "./api.js";
import { chatRequest } from "./fields.js";
import { append, numPieces } from "./origins.js";
import { signal } from "./signal.js";
import * as store from "./store.js";

const SAVE_EVERY_MS = 2000;

/** @type {Map<string, Generation>} by conversation id */
export const running = new Map();
export const progressed = signal(); // (conversation, answer)
export const ended = signal(); // (conversation, answer)

class Generation {
  constructor(conversation, answer) {
    this.conversation = conversation;
    this.answer = answer;
    this.abort = new AbortController();
    this.requestId = null; // the server's name for it, as in the panel's list of streams
    this.firstAt = null;
  }

  /** Tokens a second as seen from here, from the first token on. */
  get rate() {
    const seconds = this.firstAt === null ? 0 : (performance.now() - this.firstAt) / 1000;
    return seconds > 0.2 ? (numPieces(this.answer) - this.piecesAtFirst) / seconds : NaN;
  }

  stop() {
    this.abort.abort();
  }

  async run() {
    const saving = setInterval(() => store.save(this.conversation), SAVE_EVERY_MS);
    try {
      const request = chatRequest(this.conversation, this.answer);
      for await (const chunk of chatChunks(request, this.abort.signal)) this.take(chunk);
      this.answer.state = "done";
    } catch (error) {
      this.fail(error);
    } finally {
      clearInterval(saving);
      running.delete(this.conversation.id);
      store.save(this.conversation);
      ended(this.conversation, this.answer);
    }
  }

  take(chunk) {
    this.requestId = chunk.id;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (thought) this.answer.thinking = (this.answer.thinking ?? "") + thought;
    if (content) append(this.answer, content, choice.origins);
    if (choice.finish_reason) this.answer.finish = choice.finish_reason;
    if (chunk.timings) this.answer.timings = chunk.timings;
    if (this.firstAt === null && this.answer.text) {
      this.firstAt = performance.now();
      this.piecesAtFirst = numPieces(this.answer);
    }
    progressed(this.conversation, this.answer);
  }

  /** The page is being left: the browser cuts the connection, which is nobody's failure. */
  leave() {
    Object.assign(this.answer, { state: "failed", notice: store.LEFT });
    store.save(this.conversation);
  }

  fail(error) {
    this.answer.rate = this.rate;
    if (this.answer.state !== "streaming") return; // left already
    if (this.abort.signal.aborted) {
      this.answer.state = "stopped";
      return;
    }
    if (!(error instanceof ServerError)) throw error; // a mistake of ours: let the console show it
    Object.assign(this.answer, { state: "failed", notice: error.message, retryAfter: error.retryAfter });
  }
}

function begin(conversation) {
  const answer = { role: "assistant", text: "", marks: [], state: "streaming", timings: null };
  conversation.messages.push(answer);
  const generation = new Generation(conversation, answer);
  running.set(conversation.id, generation);
  store.touch(conversation);
  progressed(conversation, answer);
  generation.run();
}

export function ask(conversation, words) {
  if (running.has(conversation.id)) return;
  if (conversation.messages.length === 0 && conversation.title === "New chat")
    conversation.title = store.titleFrom(words);
  conversation.messages.push({ role: "user", text: words });
  begin(conversation);
}

/** Asks for the last answer again. */
export function again(conversation) {
  if (running.has(conversation.id) || conversation.messages.at(-1)?.role !== "assistant") return;
  conversation.messages.pop();
  begin(conversation);
}

window.addEventListener("pagehide", () => running.forEach((generation) => generation.leave()));

export const stop = (conversation) => running.get(conversation.id)?.stop();
