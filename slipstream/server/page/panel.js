// The live panel: what /v1/status said last, each number in the element that names it with data-field.

import { byId, el, setText } from "./dom.js";
import { bytes, count, duration, percent, plural, shortCount, speed } from "./format.js";
import * as generation from "./generation.js";
import { tint } from "./origins.js";
import { Sparkline } from "./sparkline.js";
import { polled } from "./status.js";

const STATES = {
  ready: "ready",
  draining: "finishing its work, then leaving",
  loading: "loading the model",
  failed: "its engine has failed",
};
const MAX_STREAM_ROWS = 24;

export class Panel {
  constructor() {
    this.root = byId("live");
    this.sparkline = new Sparkline();
    byId("sparkline").append(this.sparkline.node);
    this.positions = [];
    polled.listen((status) => this.show(status));
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
    this.showLoad(latest.load);
    this.showSpeculation(latest.speculation);
    this.showStreams(latest.streams);
    this.showMemory(latest.memory);
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

  showSpeculation(speculation) {
    const { available, depth, max_depth, mean_accepted_length, draft_tokens, accepted_tokens } = speculation;
    this.field("speculation.depth", available ? count(depth) : "off");
    this.field(
      "speculation.of",
      available ? `${depth === 1 ? "token" : "tokens"} ahead · ${speculation.policy}, at most ${max_depth}` : "",
    );
    this.field("speculation.reason", available ? speculation.reason : speculation.why_not);
    this.field("speculation.mean", mean_accepted_length.toFixed(2));
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
    const { kv_blocks_used, kv_blocks_total } = memory;
    byId("kv-meter").style.width = `${kv_blocks_total ? (100 * kv_blocks_used) / kv_blocks_total : 0}%`;
    this.field("memory.kv_blocks_used", count(kv_blocks_used));
    this.field("memory.kv_blocks_total", count(kv_blocks_total));
    this.field("memory.block_size", plural(memory.block_size, "token"));
    for (const name of ["kv_bytes", "weight_bytes", "state_bytes", "rss_bytes"])
      this.field(`memory.${name}`, bytes(memory[name]));
    byId("state-row").hidden = memory.state_bytes === 0;
  }
}

/** A stream of this page goes by the title of its conversation: the answer's id ends with the stream's. */
function nameOf({ id }) {
  const own = [...generation.running.values()].find(
    ({ requestId }) => requestId === id || requestId?.endsWith(`-${id}`),
  );
  return own ? own.conversation.title : `stream ${id.slice(-8)}`;
}

function streamRow(stream) {
  const name = nameOf(stream);
  const accepted = stream.draft_tokens ? `, ${percent(stream.accepted_tokens, stream.draft_tokens)} accepted` : "";
  const speedNow = stream.state === "decode" ? `${speed(stream.tokens_per_second)} tok/s` : stream.state;
  return el(
    "li",
    { "data-stream": stream.id },
    el("span", { class: "name", title: name }, name),
    el("span", { class: "speed" }, speedNow),
    el("span", { class: "detail" }, `${plural(stream.generated, "token")} · depth ${stream.depth}${accepted}`),
  );
}
