// The theme switch: as the system has it, light, dark. The colours themselves are in tokens.css.

import { byId, icon } from "./dom.js";
import { choice, remember } from "./storage.js";

const THEMES = { system: "as the system", light: "light", dark: "dark" };

function apply(theme) {
  if (theme === "system") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = theme;
  const button = byId("theme");
  const label = `Theme: ${THEMES[theme]}`;
  button.setAttribute("aria-label", label);
  button.title = label;
  button.replaceChildren(icon(theme));
}

export function themeSwitch() {
  const stored = choice("theme", "system");
  let theme = stored in THEMES ? stored : "system";
  apply(theme);
  byId("theme").addEventListener("click", () => {
    const names = Object.keys(THEMES);
    theme = names[(names.indexOf(theme) + 1) % names.length];
    remember("theme", theme);
    apply(theme);
  });
}
