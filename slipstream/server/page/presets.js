// Named sets of system prompt and settings, kept in this browser for every conversation.

import { choice, remember } from "./storage.js";

const MAX_PRESETS = 50;

const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** @returns {{name: string, system: string, settings: object}[]} by name */
export function all() {
  try {
    const raw = JSON.parse(choice("presets", "[]"));
    const good = (p) => isObject(p) && typeof p.name === "string" && typeof p.system === "string" && isObject(p.settings);
    return Array.isArray(raw) ? raw.filter(good) : [];
  } catch {
    return [];
  }
}

/** Keeps a set under a name; one of the same name is replaced. False: there are too many. */
export function keep(name, { system, settings }) {
  const others = all().filter((preset) => preset.name !== name);
  if (others.length >= MAX_PRESETS) return false;
  const sorted = [...others, { name, system, settings: { ...settings } }].sort((a, b) => a.name.localeCompare(b.name));
  remember("presets", JSON.stringify(sorted));
  return true;
}

export function remove(name) {
  remember("presets", JSON.stringify(all().filter((preset) => preset.name !== name)));
}
