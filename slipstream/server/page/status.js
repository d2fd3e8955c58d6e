// What the server says of itself, asked each second while the page is seen.

import { fetchStatus } from "./api.js";
import { signal } from "./signal.js";

const EVERY_MS = 1000;

export const status = { latest: null, error: null, since: null };
export const polled = signal();

async function poll() {
  try {
    status.latest = await fetchStatus();
    status.error = null;
    status.since = null;
  } catch (error) {
    status.error = error.message;
    status.since ??= Date.now();
  }
  polled(status);
}

/** Asks now and then each second; a slow answer delays the next question instead of piling up. */
export function keepPolling() {
  let timer = null;
  const round = async () => {
    await poll();
    timer = document.hidden ? null : setTimeout(round, EVERY_MS);
  };
  document.addEventListener("visibilitychange", () => {
    if (document.hidden || timer !== null) return;
    timer = setTimeout(round, 0);
  });
  round();
}
