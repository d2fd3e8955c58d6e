// Answers on their way: one per conversation, any number of conversations at once. Knows no view.

import { chatChunks, ServerError } from "./api.js";
import { chatRequest } from "./fields.js";
import { joined } from "./figures.js";
import { append, numPieces } from "./origins.js";
import { signal } from "./signal.js";
import * as store from "./store.js";
import { add, find, path, remove } from "./tree.js";

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
    this.firstAt = null;
    // The server's list of streams has this name.
    answer.requestId = `page-${crypto.randomUUID?.() ?? Math.random().toString(36).slice(2)}`;
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
      for await (const chunk of chatChunks(request, this.answer.requestId, this.abort.signal)) this.take(chunk);
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
    if (chunk.usage) this.answer.usage = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const { content, reasoning_content: thought } = choice.delta ?? {};
    if (thought) this.answer.thinking = (this.answer.thinking ?? "") + thought;
    if (content) append(this.answer, content, choice.origins);
    if (choice.finish_reason) this.answer.finish = choice.finish_reason;
    if (chunk.timings) this.answer.timings = joined(this.answer.timings, chunk.timings);
    if (this.firstAt === null && content) {
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

function run(conversation, answer) {
  const generation = new Generation(conversation, answer);
  running.set(conversation.id, generation);
  store.touch(conversation);
  progressed(conversation, answer);
  generation.run();
}

function answerTo(conversation, question) {
  const answer = { role: "assistant", text: "", marks: [], state: "streaming", timings: null, usage: null };
  run(conversation, add(conversation, question, answer));
}

export function ask(conversation, words) {
  if (running.has(conversation.id)) return;
  if (conversation.messages.length === 0 && conversation.title === "New chat")
    conversation.title = store.titleFrom(words);
  answerTo(conversation, add(conversation, path(conversation).at(-1), { role: "user", text: words }));
}

/** Another wording of a question, and its own answer; the old ones stay beside them. */
export function askOtherwise(conversation, question, words) {
  if (running.has(conversation.id)) return;
  const parent = find(conversation, question.parent);
  answerTo(conversation, add(conversation, parent, { role: "user", text: words }));
}

/** Another answer beside this one; one that has nothing to keep goes. */
export function again(conversation, answer) {
  if (running.has(conversation.id)) return;
  const question = find(conversation, answer.parent);
  if (answer.text === "" && !answer.thinking) remove(conversation, answer);
  answerTo(conversation, question);
}

/** Goes on where the last answer was cut. */
export function resume(conversation, answer) {
  if (running.has(conversation.id) || path(conversation).at(-1) !== answer) return;
  Object.assign(answer, { state: "streaming", continued: true, finish: undefined, notice: "" });
  run(conversation, answer);
}

window.addEventListener("pagehide", () => running.forEach((generation) => generation.leave()));

export const stop = (conversation) => running.get(conversation.id)?.stop();
