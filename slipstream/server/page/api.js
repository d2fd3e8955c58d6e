// The server's public endpoints, and its refusals as sentences a person can act on.

import { serverEvents } from "./sse.js";

/** What went wrong with a request. `kind`: gone, key, busy, refused, failed or broken. */
export class ServerError extends Error {
  constructor(kind, message, retryAfter = null) {
    super(message);
    this.kind = kind;
    this.retryAfter = retryAfter; // seconds
  }
}

const GONE = "The server does not answer. Is it still running? Nothing you wrote is lost.";
const KEY = "The server asks for its API key. Reload this page to enter it.";
const BROKEN = "The connection broke in the middle of the answer. What had come is kept.";

async function reach(path, options) {
  try {
    return await fetch(path, options);
  } catch (error) {
    if (options.signal?.reason?.name === "AbortError") throw error;
    throw new ServerError("gone", GONE);
  }
}

function secondsToWait(header) {
  if (header === null) return null;
  const seconds = /^\d+$/.test(header) ? Number(header) : (Date.parse(header) - Date.now()) / 1000;
  return Number.isFinite(seconds) ? Math.max(0, Math.min(3600, Math.ceil(seconds))) : null;
}

async function serverMessage(response) {
  try {
    const body = await response.json();
    return String(body.error?.message ?? body.error ?? body.detail ?? "").trim();
  } catch {
    return "";
  }
}

/** The server's own words as the end of our sentence. */
const withReason = (start, reason) => (reason ? `${start}: ${reason.replace(/[.\s]*$/, "")}.` : `${start}.`);

async function refusal(response) {
  const reason = await serverMessage(response);
  const wait = secondsToWait(response.headers.get("Retry-After"));
  if (response.status === 401) return new ServerError("key", KEY);
  if (response.status === 429) {
    const when = wait === null ? "Try again in a moment." : `It asks to wait ${wait} s.`;
    return new ServerError("busy", `${withReason("The server is full", reason)} ${when}`, wait ?? 1);
  }
  if (response.status < 500) return new ServerError("refused", withReason("The server refused this request", reason));
  const start = response.status === 503 ? "The server takes no requests now" : `The server failed (${response.status})`;
  return new ServerError("failed", withReason(start, reason), wait);
}

/** Chunks of a streamed chat completion. Throws ServerError; an abort by the caller throws what fetch throws. */
export async function* chatChunks(request, requestId, abort) {
  const response = await reach("/v1/chat/completions", {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Request-Id": requestId },
    body: JSON.stringify(request),
    signal: abort,
  });
  if (!response.ok) throw await refusal(response);
  let finished = false;
  try {
    for await (const data of serverEvents(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error)
        throw new ServerError("failed", withReason("The server broke off", String(chunk.error.message ?? "")));
      finished ||= Boolean(chunk.choices?.[0]?.finish_reason);
      yield chunk;
    }
  } catch (error) {
    if (error instanceof ServerError || abort.aborted) throw error;
    throw new ServerError("broken", BROKEN);
  }
  if (!finished) throw new ServerError("broken", BROKEN);
}

export async function fetchStatus() {
  const response = await reach("/v1/status", { signal: AbortSignal.timeout(5000), cache: "no-store" });
  if (!response.ok) throw await refusal(response);
  try {
    return await response.json();
  } catch {
    throw new ServerError("failed", "The server's status could not be read.");
  }
}
