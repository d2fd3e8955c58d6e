/** The smallest way to hear of changes: call it to notify, `.listen(fn)` to hear. */
export function signal() {
  const listeners = new Set();
  const notify = (...details) => {
    for (const listener of [...listeners]) listener(...details);
  };
  notify.listen = (listener) => listeners.add(listener);
  return notify;
}
