// The live panel: what /v1/status said last, each number in the element that names it with data-field.

import { byId, el, setText } from "./dom.js";
import { gainWords } from "./figures.js";
import { bytes, count, duration, percent, plural, shortCount, speed } from "./format.js";
import * as generation from "./generation.js";
import { tint } from "./origins.js";
import { Sparkline } from "./sparkline.js";
import { polled } from "./status.js";
import * as store from "./store.js";
import { path } from "./tree.js";

const STATES = {
  ready: "ready",
  draining: "finishing its work, then leaving",
  loading: "loading the model",
  sleeping: "asleep, the next question wakes it",
  waking: "loading the model again",
  failed: "its engine has failed",
};
const MAX_STREAM_ROWS = 24;

export class Panel {
  constructor() {
    this.root = byId("live");
    this.sparkline = new Sparkline();
    byId("sparkline").append(this.sparkline.node);
    this.positions = [];
    this.conversation = null;
    this.streams = [];
    polled.listen((status) => this.show(status));
    generation.ended.listen(() => this.showOwn());
  }

  open(conversation) {
    this.conversation = conversation;
    this.showOwn();
  }

  /** What drafts bring the reader: in the answer that comes right now, else in the last one. */
  showOwn() {
    const stream = this.streams.find((each) => conversationOf(each) === this.conversation);
    const timings = path(this.conversation).findLast((message) => message.timings)?.timings;
    const gain = stream?.gain ?? timings?.gain;
    const rate = stream?.tokens_per_second ?? timings?.predicted_per_second;
    const drafted = (stream?.draft_tokens ?? timings?.draft_n) > 0;
    this.field("own.gain", Number.isFinite(gain) ? gainWords(gain) : "–");
    const when = stream ? "right now" : "in the last answer";
    const words = `${speed(rate)} tokens/s ${when}${drafted ? "" : ", without drafts"}.`;
    this.field("own.words", Number.isFinite(rate) ? words : "Ask something to see what drafts bring.");
  }

  show({ latest, error, since }) {
    this.root.classList.toggle("stale", error !== null);
    document.body.dataset.server = error === null ? "there" : "gone";
    const away = since === null ? "" : ` Asking again each second, for ${duration((Date.now() - since) / 1000)} now.`;
    setText(byId("server-error"), error === null ? "" : error + away);
    if (error !== null) this.field("model.state", "no connection");
    if (error !== null || latest === null) return;
    this.field("model.state", STATES[latest.state] ?? latest.state);
    if (!latest.model) return; // still loading
    this.showModel(latest);
    this.streams = latest.streams;
    this.showOwn();
    this.showLoad(latest.load);
    this.showSpeculation(latest.speculation, latest.load);
    this.showStreams(latest.streams);
    this.showMemory(latest.memory);
    this.field("prefix_cache.words", prefixCacheWords(latest.prefix_cache));
  }

  field(name, words) {
    for (const node of document.querySelectorAll(`[data-field="${name}"]`)) setText(node, words);
  }

  showModel({ model, device, version, uptime_s }) {
    this.field("model.id", model.id);
    this.field("model.about", `${model.architecture} · ${model.format} · context ${count(model.context)}`);
    this.field("device.note", device.note);
    this.field("version", `Slipstream ${version}, up for ${duration(uptime_s)}`);
  }

  showLoad(load) {
    this.sparkline.push(load.tokens_per_second);
    this.field("load.tokens_per_second", speed(load.tokens_per_second));
    this.field("load.top", `peak ${speed(this.sparkline.peak)} in two minutes`);
    this.field("load.running", count(load.running));
    this.field("load.max_streams", count(load.max_streams));
    this.field("load.waiting", count(load.waiting));
    this.field("load.generated_tokens", shortCount(load.generated_tokens));
  }

  showSpeculation(speculation, load) {
    const { draft_tokens, accepted_tokens } = speculation;
    this.field("speculation.words", draftingWords(speculation, load));
    this.field("speculation.reason", speculation.available ? speculation.reason : speculation.why_not);
    this.field("speculation.mean", tokensPerStep(speculation, load).toFixed(2));
    this.field("speculation.accepted", `${shortCount(accepted_tokens)} of ${shortCount(draft_tokens)}`);
    this.showPositions(speculation);
  }

  showPositions({ drafted_per_position, accepted_per_position }) {
    const used = drafted_per_position.findLastIndex((n) => n > 0) + 1;
    byId("no-drafts").hidden = used > 0;
    while (this.positions.length < used) this.addPosition(this.positions.length + 1);
    this.positions.forEach((row, i) => {
      const drafted = drafted_per_position[i] ?? 0;
      const accepted = accepted_per_position[i] ?? 0;
      row.node.hidden = i >= used;
      row.fill.style.width = `${drafted ? (100 * accepted) / drafted : 0}%`;
      setText(row.percent, percent(accepted, drafted));
      setText(row.counts, `${shortCount(accepted)} / ${shortCount(drafted)}`);
    });
  }

  addPosition(position) {
    const fill = el("span", { class: "fill", "data-tint": tint(position) });
    const share = el("span", { class: "percent", "data-field": `position.${position}.percent` });
    const counts = el("span", { class: "counts", "data-field": `position.${position}.counts` });
    const track = el("span", { class: "track", "aria-hidden": "true" }, fill);
    const node = el("li", {}, el("span", { class: "position" }, String(position)), track, share, counts);
    this.positions.push({ node, fill, percent: share, counts });
    byId("positions").append(node);
  }

  showStreams(streams) {
    byId("no-streams").hidden = streams.length > 0;
    byId("streams").replaceChildren(...streams.slice(0, MAX_STREAM_ROWS).map(streamRow));
    const hidden = streams.length - MAX_STREAM_ROWS;
    setText(byId("more-streams"), hidden > 0 ? `and ${count(hidden)} more` : "");
  }

  showMemory(memory) {
    const { kv_blocks_used: used, kv_blocks_total: total, block_size } = memory;
    byId("kv-meter").style.width = `${total ? (100 * used) / total : 0}%`;
    this.field("memory.tokens", count(total * block_size));
    this.field("memory.tokens_used", count(used * block_size));
    for (const name of ["kv_bytes", "weight_bytes", "state_bytes", "rss_bytes"])
      this.field(`memory.${name}`, bytes(memory[name]));
    byId("state-part").hidden = memory.state_bytes === 0;
  }
}

/** What a row gets in a step, with drafts or without. */
function tokensPerStep({ tokens_per_step, drafts, plain_row_steps }, { generated_tokens }) {
  const steps = drafts + plain_row_steps;
  return tokens_per_step ?? (steps ? generated_tokens / steps : 0);
}

export function draftingWords({ available, why_not, policy, depth, max_depth }, { running }) {
  if (!available) return `No drafting: ${why_not}`;
  if (policy === "off" || policy === "0") return "Drafting is off by the server’s settings.";
  if (running === 0) return `Idle. Drafts up to ${plural(max_depth, "token")} ahead where that pays.`;
  if (depth > 0) return `Drafting ${plural(depth, "token")} ahead.`;
  return policy === "solo" && running > 1
    ? "Not drafting now: several streams are running."
    : "Not drafting now: a plain step is faster.";
}

export function prefixCacheWords({ enabled, queried_tokens, found_tokens, states_used, states_total }) {
  if (!enabled) return "Prefix cache: off.";
  const states = states_total > 0 ? `, ${plural(states_used, "state")}` : "";
  if (!queried_tokens) return `Prefix cache: no prompt so far${states}.`;
  return `Prefix cache: ${percent(found_tokens, queried_tokens)} of prompt tokens found${states}.`;
}

/** The conversation that a stream answers, where it is one of this browser's. */
function conversationOf({ request_id }) {
  if (!request_id) return undefined;
  return store.all().find(({ messages }) => messages.some((message) => message.requestId === request_id));
}

function streamRow(stream) {
  const name = conversationOf(stream)?.title ?? "another client";
  const accepted = stream.draft_tokens ? `${percent(stream.accepted_tokens, stream.draft_tokens)} of drafts accepted` : "";
  const speedNow = stream.state === "decode" ? `${speed(stream.tokens_per_second)} tok/s` : "reading its prompt";
  const gain = stream.draft_tokens && Number.isFinite(stream.gain) ? `${gainWords(stream.gain)} plain` : "";
  const details = [plural(stream.generated, "token"), accepted || "no drafts", gain].filter(Boolean);
  return el(
    "li",
    { "data-stream": stream.id },
    el("span", { class: "name", title: name }, name),
    el("span", { class: "speed" }, speedNow),
    el("span", { class: "detail" }, details.join(" · ")),
  );
}
