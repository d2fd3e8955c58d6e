// What a request may set: one table that both the form and the request are made from.
// An empty field is not sent, so the server's own default holds.

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
  label: "Depth",
  min: 1,
  max: 8,
  step: 1,
  whole: true,
  help: "tokens drafted ahead in each step",
};
export const P_MIN = {
  name: "p_min",
  label: "P-min",
  min: 0,
  max: 1,
  step: 0.05,
  help: "stop drafting below this confidence",
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

/** The body of POST /v1/chat/completions for all messages before the answer to be written. */
export function chatRequest(conversation, answer) {
  const before = conversation.messages.slice(0, conversation.messages.indexOf(answer)).filter((m) => m.text !== "");
  const messages = before.map(({ role, text }) => ({ role, content: text }));
  if (conversation.system.trim()) messages.unshift({ role: "system", content: conversation.system });
  const request = { messages, stream: true, return_origins: true };
  for (const field of SAMPLING)
    if (usable(field, conversation.settings)) request[field.name] = conversation.settings[field.name];
  const drafts = speculative(conversation.settings);
  return drafts ? { ...request, speculative: drafts } : request;
}

/** The settings in a few words, for the line under the message box. */
export function summary(settings) {
  const drafting =
    { off: "drafting off", fixed: `drafting at depth ${settings.depth ?? 1}` }[settings.drafting] ??
    "drafting automatic";
  const temperature = usable(SAMPLING[0], settings) ? `temperature ${settings.temperature}` : null;
  const seed = Number.isFinite(settings.seed) ? `seed ${settings.seed}` : null;
  return [temperature, seed, drafting].filter(Boolean).join(" · ");
}
