// Building nodes. Text always becomes a text node, so nothing a model writes is ever read as markup.

/** An element with attributes, listeners (`onclick: fn`) and children; null and false children are left out. */
export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

const SVG = "http://www.w3.org/2000/svg";

export function svg(tag, attributes = {}, ...children) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, String(value));
  node.append(...children);
  return node;
}

/** One of the symbols drawn in index.html. */
export function icon(name) {
  return svg("svg", { class: "icon", "aria-hidden": "true" }, svg("use", { href: `#i-${name}` }));
}

export function iconButton(name, label, onclick, className = "quiet") {
  return el(
    "button",
    { type: "button", class: `icon-button ${className}`, "aria-label": label, title: label, onclick },
    icon(name),
  );
}

export const byId = (id) => document.getElementById(id);

/** Sets the text only where it changed: a selection survives, and nothing is announced twice. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}
