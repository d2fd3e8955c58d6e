// The browser's storage, or a stand-in that forgets where it is forbidden (some private windows).

function usable() {
  try {
    localStorage.setItem("slipstream.probe", "1");
    localStorage.removeItem("slipstream.probe");
    return localStorage;
  } catch {
    return forgetful();
  }
}

function forgetful() {
  const kept = new Map();
  return {
    getItem: (key) => kept.get(key) ?? null,
    setItem: (key, value) => kept.set(key, String(value)),
    removeItem: (key) => kept.delete(key),
    key: (index) => [...kept.keys()][index] ?? null,
    get length() {
      return kept.size;
    },
  };
}

export const storage = usable();

/** One remembered choice of the page itself (theme, panel, view). */
export const choice = (name, fallback) => storage.getItem(`slipstream.${name}`) ?? fallback;

export function remember(name, value) {
  try {
    storage.setItem(`slipstream.${name}`, value);
  } catch {
    // Full: the choice holds until the page is closed.
  }
}
