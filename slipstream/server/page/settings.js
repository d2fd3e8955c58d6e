// The form for one conversation's system prompt, drafting and sampling.

import { byId, el, setText } from "./dom.js";
import { DEPTH, P_MIN, problem, SAMPLING } from "./fields.js";
import { note } from "./notes.js";
import * as presets from "./presets.js";
import { polled } from "./status.js";
import * as store from "./store.js";

const MAX_SYSTEM_CHARS = 20_000;

export class SettingsForm {
  constructor(onChange) {
    this.onChange = onChange;
    this.conversation = null;
    this.maxDepth = null; // known once the server has said it
    this.system = byId("system");
    this.system.maxLength = MAX_SYSTEM_CHARS;
    this.system.addEventListener("input", () => this.keep("system", this.system.value));
    this.drafting = [...document.querySelectorAll("input[name=drafting]")];
    for (const radio of this.drafting) radio.addEventListener("change", () => this.setDrafting(radio.value));
    this.rows = new Map([...SAMPLING, DEPTH, P_MIN].map((field) => [field.name, this.row(field)]));
    byId("draft-fields").append(this.rows.get("depth").node, this.rows.get("p_min").node);
    byId("sampling-fields").append(...SAMPLING.map((field) => this.rows.get(field.name).node));
    byId("reset-settings").addEventListener("click", () => this.apply({ system: "", settings: {} }));
    this.listenForPresets();
    polled.listen((status) => this.showServer(status.latest));
  }

  listenForPresets() {
    const name = byId("preset-name");
    byId("preset").addEventListener("change", (event) => {
      const chosen = presets.all().find((preset) => preset.name === event.target.value);
      this.apply(chosen ?? { system: "", settings: {} });
    });
    byId("save-preset").addEventListener("click", () => this.savePreset(name));
    name.addEventListener("keydown", (event) => event.key === "Enter" && this.savePreset(name));
    byId("delete-preset").addEventListener("click", () => this.deletePreset());
  }

  savePreset(input) {
    const name = input.value.trim();
    if (name === "") {
      input.focus();
      return;
    }
    if (presets.keep(name, this.conversation)) input.value = "";
    else note("There are too many presets. Delete one first.");
    this.showPresets();
  }

  deletePreset() {
    const gone = presets.all().find((preset) => preset.name === byId("preset").value);
    presets.remove(gone.name);
    this.showPresets();
    byId("preset").focus();
    const putBack = () => {
      presets.keep(gone.name, gone);
      this.showPresets();
    };
    note(`The preset “${gone.name}” is deleted.`, { label: "Undo", run: putBack });
  }

  /** The one that is chosen is the one that says what the conversation's settings say. */
  showPresets() {
    const { system, settings } = this.conversation;
    const same = (preset) => preset.system === system && sameFields(preset.settings, settings);
    const all = presets.all();
    const options = all.map(({ name }) => el("option", { value: name }, name));
    byId("preset").replaceChildren(el("option", { value: "" }, "None"), ...options);
    byId("preset").value = all.find(same)?.name ?? "";
    byId("delete-preset").disabled = byId("preset").value === "";
  }

  row(field) {
    const id = `field-${field.name}`;
    const attributes = {
      id,
      type: "text",
      inputmode: field.whole ? "numeric" : "decimal",
      placeholder: "default",
      autocomplete: "off",
    };
    const input = el("input", { ...attributes, "aria-describedby": `${id}-help ${id}-problem` });
    const wrong = el("p", { id: `${id}-problem`, class: "problem" });
    const help = el("p", { id: `${id}-help`, class: "help" }, field.help);
    input.addEventListener("input", () => this.typed(field, input, wrong));
    const node = el("div", { class: "field" }, el("label", { for: id }, field.label), input, help, wrong);
    return { node, input, wrong };
  }

  open(conversation) {
    this.conversation = conversation;
    this.system.value = conversation.system;
    const drafting = conversation.settings.drafting ?? "auto";
    for (const radio of this.drafting) radio.checked = radio.value === drafting;
    for (const [name, { input, wrong }] of this.rows) {
      input.value = conversation.settings[name] ?? "";
      input.removeAttribute("aria-invalid");
      setText(wrong, "");
    }
    this.showDraftFields();
    this.showPresets();
  }

  /** A value that cannot be used is shown at once, and the field counts as empty until it is mended. */
  typed(field, input, wrong) {
    const most = field === DEPTH && this.maxDepth ? this.maxDepth : field.max;
    const words = problem({ ...field, max: most }, input.value);
    setText(wrong, words);
    input.setAttribute("aria-invalid", String(words !== ""));
    const settings = this.conversation.settings;
    if (words || input.value.trim() === "") delete settings[field.name];
    else settings[field.name] = Number(input.value);
    this.changed();
  }

  setDrafting(value) {
    this.conversation.settings.drafting = value;
    if (value === "fixed" && !this.conversation.settings.depth) {
      this.conversation.settings.depth = 2;
      this.rows.get("depth").input.value = "2";
    }
    this.showDraftFields();
    this.changed();
  }

  showDraftFields() {
    const drafting = this.conversation.settings.drafting ?? "auto";
    this.rows.get("depth").node.hidden = drafting !== "fixed";
    this.rows.get("p_min").node.hidden = drafting === "off";
  }

  showServer(latest) {
    const speculation = latest?.speculation;
    this.maxDepth = speculation?.max_depth ?? this.maxDepth;
    setText(
      byId("draft-note"),
      speculation && !speculation.available ? `Drafting is not available: ${speculation.why_not}` : "",
    );
    for (const { name } of SAMPLING) {
      const value = latest?.sampling_defaults?.[name];
      if (Number.isFinite(value)) this.rows.get(name).input.placeholder = String(value);
    }
  }

  apply({ system, settings }) {
    Object.assign(this.conversation, { system, settings: { ...settings } });
    this.open(this.conversation);
    this.changed();
  }

  keep(name, value) {
    this.conversation[name] = value;
    this.changed();
  }

  changed() {
    this.showPresets();
    store.save(this.conversation);
    this.onChange();
  }
}

/** Whether two sets of settings ask for the same; automatic drafting is the same as none chosen. */
function sameFields(a, b) {
  const said = (settings) =>
    JSON.stringify(
      Object.entries({ ...settings, drafting: settings.drafting ?? "auto" })
        .filter(([, value]) => value !== undefined)
        .sort(([x], [y]) => (x < y ? -1 : 1)),
    );
  return said(a) === said(b);
}
