// A step as two lanes for each rank, predicted over measured, drawn on a canvas.

import { element } from "../shared/elements.js";
import { digitsOf, roundedNumber, shortNumber } from "../shared/numbers.js";
import { linearScale } from "../shared/scales.js";
import { MOST_RANKS } from "./ranks.js";

const LANE = 11, GAP = 3, PAIR = 8, TOP = 20, GUTTER = 98; // pixels
const PIXELS_BETWEEN_TICKS = 110;
const LEAST_TEXT = 24; // width of an action that has room for its name
const LEAST_WIDTH = 0.8; // of an action: narrower ones would fade away
const MOST_WIDTH = 16000; // pixels of a canvas, which browsers limit
const NAMES = { F: "forward", B: "backward", I: "input gradient", W: "weight gradient" };

/** A picture of a step. State: what it shows. `read` is called with what is under the pointer. */
export class StepPicture {
  constructor(container, { read }) {
    this.names = element("canvas");
    this.canvas = element("canvas", { role: "img" });
    this.scroll = element("div", { className: "step-scroll", tabIndex: 0, role: "region", aria: { label: "Timeline of a step" } }, this.canvas);
    container.replaceChildren(element("div", { className: "step" }, this.names, this.scroll));
    this.canvas.addEventListener("pointermove", (event) => read(this.at(event)));
    this.canvas.addEventListener("pointerleave", () => read(null));
  }

  /** Draw a measured step, and a predicted one if there is one, this many times as wide as fits. */
  draw(details, zoom) {
    const lanes = lanesOf(details);
    const end = Math.max(details.measured.makespan, details.predicted?.makespan ?? 0) || 1;
    const height = TOP + (lanes.at(-1)?.bottom ?? 0) + 4;
    const names = sized(this.names, GUTTER, height); // first: it leaves the rest of the width
    const width = Math.min(MOST_WIDTH / devicePixelRatio, this.scroll.clientWidth * zoom);
    this.shown = { lanes, scale: width / end };
    const label = details.predicted ? "predicted over measured" : "measured";
    this.canvas.setAttribute("aria-label", `${lanes.length} lanes, ${label}, ${shortNumber(end)} ms`);
    const colours = coloursOf(this.canvas);
    for (const lane of lanes) write(names, colours.text, nameOf(lane, details.predicted), 0, TOP + lane.top + LANE - 2);
    const context = sized(this.canvas, width, height);
    drawAxis(context, end, width, height, colours);
    for (const lane of lanes) drawLane(context, lane, width / end, colours);
  }

  at(event) {
    if (!this.shown) return null;
    const box = this.canvas.getBoundingClientRect();
    const y = event.clientY - box.top - TOP, time = (event.clientX - box.left) / this.shown.scale;
    const lane = this.shown.lanes.find(({ top, bottom }) => y >= top && y < bottom);
    const action = lane?.row.find(([, , , start, end]) => start <= time && time < end);
    if (!action) return null;
    const [kind, stage, microbatch, start, end] = action;
    return `rank ${lane.rank}, ${lane.isMeasured ? "measured" : "predicted"}: ${NAMES[kind] ?? kind} of stage ${stage}, ` +
      `micro-batch ${microbatch}: ${shortNumber(start)} to ${shortNumber(end)} ms, takes ${shortNumber(end - start)} ms`;
  }
}

function lanesOf({ measured, predicted }) {
  const lanes = [];
  let top = 0;
  measured.rows.slice(0, MOST_RANKS).forEach((row, rank) => {
    for (const [lane, isMeasured] of [[predicted?.rows[rank], false], [row, true]]) {
      if (!lane) continue;
      lanes.push({ rank, row: lane, isMeasured, top, bottom: top + LANE });
      top += LANE + GAP;
    }
    top += PAIR - GAP;
  });
  return lanes;
}

function nameOf({ rank, isMeasured }, hasPredicted) {
  if (!hasPredicted) return `rank ${rank}`;
  return isMeasured ? "measured" : `rank ${rank} predicted`;
}

function sized(canvas, width, height) {
  canvas.width = Math.round(width * devicePixelRatio);
  canvas.height = Math.round(height * devicePixelRatio);
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(devicePixelRatio, devicePixelRatio);
  context.font = "11px system-ui, Helvetica, Arial, sans-serif";
  return context;
}

function coloursOf(canvas) {
  const style = getComputedStyle(canvas);
  const colour = (name) => style.getPropertyValue(name).trim();
  return {
    text: colour("--text"), quiet: colour("--quiet"), line: colour("--line"), lane: colour("--panel"),
    ink: colour("--ink"), inkOnForward: colour("--ink-on-forward"),
    F: colour("--forward"), B: colour("--backward"), I: colour("--input-grad"), W: colour("--weight-grad"),
  };
}

function drawLane(context, { row, top, bottom }, scale, colours) {
  const y = TOP + top, height = bottom - top;
  context.fillStyle = colours.lane;
  context.fillRect(0, y, context.canvas.width, height);
  for (const [kind, , microbatch, start, end] of row) {
    const x = start * scale, width = (end - start) * scale;
    context.fillStyle = colours[kind] ?? colours.quiet;
    context.fillRect(x, y, Math.max(LEAST_WIDTH, width - (width > 3 ? 0.7 : 0)), height);
    if (width >= LEAST_TEXT) write(context, kind === "F" ? colours.inkOnForward : colours.ink, `${kind}${microbatch}`, x + 3, y + height - 2);
  }
}

function drawAxis(context, end, width, height, colours) {
  const scale = linearScale([0, end], [0, width]);
  const ticks = scale.ticks(Math.max(1, width / PIXELS_BETWEEN_TICKS));
  for (const tick of ticks) {
    const x = scale(tick), text = `${roundedNumber(tick, digitsOf(ticks))} ms`;
    const isLast = x + context.measureText(text).width / 2 > width;
    context.fillStyle = colours.line;
    context.fillRect(Math.min(x, width - 1), 14, 1, height - 14);
    context.textAlign = tick === 0 ? "left" : isLast ? "right" : "center";
    write(context, colours.quiet, text, isLast ? width : x, 11);
  }
  context.textAlign = "left";
}

function write(context, colour, text, x, y) {
  context.fillStyle = colour;
  context.fillText(text, x, y);
}
