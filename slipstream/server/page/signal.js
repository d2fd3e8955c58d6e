/** The smallest way to hear of changes: call it to tell, `.listen(fn)` to hear. */
export function signal() {
  const listeners = new Set();
  const tell = (...details) => {
    for (const listener of [...listeners]) listener(...details);
  };
  tell.listen = (listener) => listeners.add(listener);
  return tell;
}
