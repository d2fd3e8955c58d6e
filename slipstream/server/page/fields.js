// What a request may set: one table that both the form and the request are made from.
// An empty field is not sent, so the server's own default holds.

import { before } from "./tree.js";

export const SAMPLING = [
  { name: "temperature", label: "Temperature", min: 0, max: 2, step: 0.05, help: "0 always takes the likeliest token" },
  { name: "top_p", label: "Top-p", min: 0.01, max: 1, step: 0.01, help: "the likeliest tokens that together reach p" },
  {
    name: "top_k",
    label: "Top-k",
    min: 0,
    max: 100000,
    step: 1,
    whole: true,
    help: "the k likeliest tokens; 0 for all",
  },
  {
    name: "min_p",
    label: "Min-p",
    min: 0,
    max: 1,
    step: 0.01,
    help: "tokens at least p times as likely as the likeliest",
  },
  {
    name: "seed",
    label: "Seed",
    min: 0,
    max: Number.MAX_SAFE_INTEGER,
    step: 1,
    whole: true,
    help: "the same seed, the same text",
  },
  {
    name: "max_tokens",
    label: "Max tokens",
    min: 1,
    max: 1000000,
    step: 1,
    whole: true,
    help: "where an answer is cut",
  },
  {
    name: "presence_penalty",
    label: "Presence penalty",
    min: -2,
    max: 2,
    step: 0.1,
    help: "against tokens used before",
  },
  {
    name: "frequency_penalty",
    label: "Frequency penalty",
    min: -2,
    max: 2,
    step: 0.1,
    help: "against tokens by how often they were used",
  },
  {
    name: "repetition_penalty",
    label: "Repetition penalty",
    min: 0.1,
    max: 2,
    step: 0.05,
    help: "above 1 avoids tokens of prompt and answer",
  },
];

export const DEPTH = {
  name: "depth",
  label: "Tokens ahead",
  min: 1,
  max: 8,
  step: 1,
  whole: true,
  help: "drafted in each step",
};
export const P_MIN = {
  name: "p_min",
  label: "Least confidence",
  min: 0,
  max: 1,
  step: 0.05,
  help: "no draft that is less sure than this",
};

/** Why a typed value cannot be used, or "" where it can. */
export function problem(field, typed) {
  if (typed.trim() === "") return "";
  const value = Number(typed);
  const inside = value >= field.min && value <= field.max && (!field.whole || Number.isSafeInteger(value));
  const top = field.max >= 1000000 ? "up" : `to ${field.max}`;
  return inside ? "" : `${field.whole ? "A whole number" : "A number"} from ${field.min} ${top}.`;
}

const usable = (field, settings) => Number.isFinite(settings[field.name]);

function speculative(settings) {
  if (settings.drafting === "off") return { enabled: false };
  const wish = {};
  if (settings.drafting === "fixed" && usable(DEPTH, settings)) wish.depth = settings.depth;
  if (usable(P_MIN, settings)) wish.p_min = settings.p_min;
  return Object.keys(wish).length ? { enabled: true, ...wish } : null;
}

/** Two in a row by the same side are sent as one: many chat templates want the sides to take turns. */
function inTurns(messages) {
  const turns = [];
  for (const { role, text } of messages) {
    if (turns.at(-1)?.role === role) turns.at(-1).content += `\n\n${text}`;
    else turns.push({ role, content: text });
  }
  return turns;
}

/** The body of POST /v1/chat/completions for the answer to be written, or to be continued where it has text. */
export function chatRequest(conversation, answer) {
  const said = before(conversation, answer).filter((message) => message.text !== "");
  const messages = inTurns(said);
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const request = { messages, stream: true, stream_options: { include_usage: true }, return_origins: true };
  if (answer.text !== "") {
    messages.push({ role: "assistant", content: answer.text });
    Object.assign(request, { continue_final_message: true, add_generation_prompt: false });
  }
  for (const field of SAMPLING)
    if (usable(field, conversation.settings)) request[field.name] = conversation.settings[field.name];
  const drafts = speculative(conversation.settings);
  return drafts ? { ...request, speculative: drafts } : request;
}

/** The settings in a few words, for the line under the message box. `defaults`: the server's, where they are known. */
export function summary(settings, defaults = {}) {
  const value = (name) => (Number.isFinite(settings[name]) ? settings[name] : defaults[name]);
  const temperature = Number.isFinite(value("temperature")) ? `temperature ${value("temperature")}` : "Settings";
  const seed = Number.isFinite(settings.seed) ? `seed ${settings.seed}` : null;
  const drafting = { off: "no drafts", fixed: `always ${settings.depth ?? 1} ahead` }[settings.drafting] ?? null;
  return [temperature, seed, drafting].filter(Boolean).join(" · ");
}
