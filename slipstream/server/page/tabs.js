// The panel's two tabs, with the arrow keys as the ARIA pattern has them.

import { byId } from "./dom.js";
import { choice, remember } from "./storage.js";

const TABS = ["live", "settings"];

export function showTab(name) {
  for (const tab of TABS) {
    const button = byId(`tab-${tab}`);
    button.setAttribute("aria-selected", String(tab === name));
    button.tabIndex = tab === name ? 0 : -1;
    byId(tab).hidden = tab !== name;
  }
  remember("tab", name);
}

export function tabs() {
  for (const tab of TABS) {
    byId(`tab-${tab}`).addEventListener("click", () => showTab(tab));
    byId(`tab-${tab}`).addEventListener("keydown", (event) => {
      if (event.key !== "ArrowLeft" && event.key !== "ArrowRight") return;
      const other = TABS[1 - TABS.indexOf(tab)];
      showTab(other);
      byId(`tab-${other}`).focus();
    });
  }
  const stored = choice("tab", "live");
  showTab(TABS.includes(stored) ? stored : "live");
}
