// A side of the page that is a column where there is room and a drawer over the page where there is not.

import { byId } from "./dom.js";
import { choice, remember } from "./storage.js";

export class Drawer {
  /** `name` is the aside's id; below `width` it lies over the page, and everything else rests meanwhile. */
  constructor(name, width, opener) {
    this.name = name;
    this.aside = byId(name);
    this.narrow = matchMedia(`(width < ${width}px)`);
    this.openers = [...document.querySelectorAll(opener)];
    this.isOpen = false;
    for (const button of this.openers) button.addEventListener("click", () => this.toggle());
    this.aside.querySelector("[data-close]").addEventListener("click", () => this.toggle(false));
    byId("scrim").addEventListener("click", () => this.closeIfOver());
    this.narrow.addEventListener("change", () => this.settle());
    this.settle();
  }

  /** As a column: as it was left. As a drawer: closed until asked for. */
  settle() {
    this.show(!this.narrow.matches && choice(this.name, "open") === "open");
  }

  get isOver() {
    return this.isOpen && this.narrow.matches;
  }

  toggle(open = !this.isOpen) {
    if (!this.narrow.matches) remember(this.name, open ? "open" : "closed");
    this.show(open);
    if (open && this.narrow.matches) this.aside.querySelector("[data-close]").focus();
    if (!open) this.openers.find((button) => button.checkVisibility())?.focus();
  }

  closeIfOver() {
    const was = this.isOver;
    if (was) this.toggle(false);
    return was;
  }

  show(open) {
    this.isOpen = open;
    document.body.classList.toggle(`${this.name}-open`, open);
    document.body.classList.toggle(`${this.name}-over`, this.isOver);
    for (const button of this.openers) button.setAttribute("aria-expanded", String(open));
    letRest();
  }
}

/** What lies under a drawer, and a side that is closed, can be neither focused nor clicked. */
function letRest() {
  const has = (name) => document.body.classList.contains(name);
  const over = ["sidebar", "panel"].find((name) => has(`${name}-over`));
  byId("scrim").hidden = !over;
  for (const name of ["sidebar", "main", "panel"]) {
    byId(name).inert = over ? name !== over : name !== "main" && !has(`${name}-open`);
  }
}
