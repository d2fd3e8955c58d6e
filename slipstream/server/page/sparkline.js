// The last two minutes of tokens a second as a line. A picture beside a number: hidden from screen readers.

import { svg } from "./dom.js";

const WIDTH = 240;
const HEIGHT = 48;
const NUM_POINTS = 120;

export class Sparkline {
  constructor() {
    this.values = [];
    this.area = svg("polygon", { class: "spark-area" });
    this.line = svg("polyline", { class: "spark-line" });
    const box = {
      viewBox: `0 0 ${WIDTH} ${HEIGHT}`,
      preserveAspectRatio: "none",
      "aria-hidden": "true",
      class: "spark",
    };
    this.node = svg("svg", box, this.area, this.line);
  }

  get peak() {
    return Math.max(0, ...this.values);
  }

  push(value) {
    this.values.push(Number.isFinite(value) ? value : 0);
    if (this.values.length > NUM_POINTS) this.values.shift();
    this.draw();
  }

  draw() {
    const step = WIDTH / (NUM_POINTS - 1);
    const top = Math.max(1, this.peak);
    const left = WIDTH - step * (this.values.length - 1);
    const points = this.values.map(
      (value, i) => `${(left + i * step).toFixed(1)},${(HEIGHT - 2 - (value / top) * (HEIGHT - 6)).toFixed(1)}`,
    );
    this.line.setAttribute("points", points.join(" "));
    this.area.setAttribute("points", `${left.toFixed(1)},${HEIGHT} ${points.join(" ")} ${WIDTH},${HEIGHT}`);
  }
}
