// A chart of one curve of several runs, which can be zoomed along steps or time.

import { axes } from "../shared/axes.js";
import { roundedNumber, shortNumber } from "../shared/numbers.js";
import { amountScale, extentOf, linearScale } from "../shared/scales.js";
import { svgElement } from "../shared/svg.js";
import { nearest, rangeOf, smoothed } from "./series.js";

const HEIGHT = 260;
const MARGIN = { left: 58, top: 26, right: 12, bottom: 42 };
const LEAST_DRAG = 5; // pixels: less is a click
const STEP = 0.25; // of what is shown, that a key moves or zooms by

/** A chart. State: what it shows, and where a drag began. `zoom` is called with a new range. */
export class CurveChart {
  constructor(container, title, { zoom, read }) {
    Object.assign(this, { container, title, zoom, read, start: null, shown: null });
    this.svg = svgElement("svg", { class: "chart", height: HEIGHT, tabindex: 0, role: "img" });
    container.replaceChildren(this.svg);
    this.svg.addEventListener("pointerdown", (event) => this.press(event));
    this.svg.addEventListener("pointermove", (event) => this.move(event));
    this.svg.addEventListener("pointerup", (event) => this.release(event));
    this.svg.addEventListener("pointercancel", () => { this.start = null; this.select(null); });
    this.svg.addEventListener("pointerleave", () => this.read(null));
    this.svg.addEventListener("dblclick", () => this.zoom(null));
    this.svg.addEventListener("keydown", (event) => this.key(event));
  }

  /** Draw series of { name, colour, points }; `range` is what is shown of x, or null for all. */
  draw(series, { range, smoothing, logarithmic, along }) {
    const width = Math.max(260, this.container.clientWidth);
    const frame = { left: MARGIN.left, top: MARGIN.top, right: width - MARGIN.right, bottom: HEIGHT - MARGIN.bottom };
    const whole = rangeOf(series);
    const x = linearScale(range ?? whole, [frame.left, frame.right]);
    const lines = series.map((each) => ({ ...each, smooth: smoothed(each.points, smoothing) }));
    const y = valueScale(lines, x.domain, [frame.bottom, frame.top], logarithmic);
    this.shown = { x, lines, whole, frame };
    this.svg.setAttribute("width", width);
    this.svg.setAttribute("aria-label", this.summary(lines));
    const clip = `clip-${this.title.replace(/\W/g, "")}`;
    const { left, top, right, bottom } = frame;
    const box = svgElement("rect", { x: left, y: top - 3, width: right - left, height: bottom - top + 6 });
    const drawn = svgElement("g", { "clip-path": `url(#${clip})` });
    for (const { colour, points, smooth } of lines) {
      if (smoothing > 0) drawn.append(curve(points, x, y, `faint run-${colour}`));
      drawn.append(curve(smooth, x, y, `run-${colour}`));
    }
    this.selection = svgElement("rect", { class: "selection", y: top, height: bottom - top, width: 0 });
    this.cursor = svgElement("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
    const alongTitle = along === "step" ? "step" : "time";
    this.svg.replaceChildren(
      svgElement("clipPath", { id: clip }, box),
      axes(frame, { scale: x, format: along === "step" ? roundedNumber : duration, title: alongTitle },
        { scale: y, format: roundedNumber, title: this.title }),
      drawn, this.selection, this.cursor,
    );
  }

  /** Mark an x, at which all charts are read; null for none. */
  mark(x) {
    if (!this.shown) return;
    this.cursor.setAttribute("visibility", x === null ? "hidden" : "visible");
    if (x === null) return;
    this.cursor.setAttribute("x1", this.shown.x(x));
    this.cursor.setAttribute("x2", this.shown.x(x));
  }

  /** Return the values of all runs next to an x, as texts. */
  valuesAt(x) {
    return this.shown.lines.map(({ name, smooth }) => [name, nearest(smooth, x)])
      .filter(([, point]) => point !== null);
  }

  summary(lines) {
    const last = lines.map(({ name, smooth }) => [name, smooth.findLast(([, value]) => value !== null)]);
    const texts = last.map(([name, point]) => `${name}: ${point ? shortNumber(point[1]) : "nothing yet"}`);
    return `${this.title}. Last values: ${texts.join("; ")}. Keys + and − zoom, arrow keys move.`;
  }

  pixel(event) {
    const { left, right } = this.shown.frame;
    return Math.min(right, Math.max(left, event.clientX - this.svg.getBoundingClientRect().left));
  }

  press(event) {
    if (!this.shown || event.button !== 0) return;
    this.start = this.pixel(event);
    this.svg.setPointerCapture(event.pointerId);
  }

  move(event) {
    if (!this.shown) return;
    const at = this.pixel(event);
    this.read(this.shown.x.invert(at));
    if (this.start !== null) this.select([this.start, at]);
  }

  release(event) {
    if (this.start === null) return;
    const ends = [this.start, this.pixel(event)].sort((a, b) => a - b);
    this.start = null;
    this.select(null);
    if (ends[1] - ends[0] >= LEAST_DRAG) this.zoom(ends.map(this.shown.x.invert));
  }

  select(ends) {
    const [low, high] = ends ? [...ends].sort((a, b) => a - b) : [0, 0];
    this.selection?.setAttribute("x", low);
    this.selection?.setAttribute("width", high - low);
  }

  key(event) {
    if (!this.shown || event.ctrlKey || event.metaKey || event.altKey) return;
    const [low, high] = this.shown.x.domain;
    const part = STEP * (high - low);
    const ranges = {
      "+": [low + part, high - part], "=": [low + part, high - part],
      "-": [low - part, high + part], "−": [low - part, high + part],
      ArrowLeft: [low - part, high - part], ArrowRight: [low + part, high + part],
      Home: null, Escape: null,
    };
    if (!(event.key in ranges)) return;
    event.preventDefault();
    this.zoom(ranges[event.key] && within(ranges[event.key], this.shown.whole));
  }
}

/** Return a range moved and cut such that it is within another; null if it is all of that. */
export function within([low, high], [least, most]) {
  const width = high - low;
  if (width >= most - least) return null;
  const start = Math.min(Math.max(low, least), most - width);
  return [start, start + width];
}

function valueScale(lines, [low, high], pixels, logarithmic) {
  const values = lines.flatMap(({ smooth }) => smooth
    .filter(([x, value]) => value !== null && x >= low && x <= high && (!logarithmic || value > 0))
    .map(([, value]) => value));
  const [least, most] = extentOf(values) ?? (logarithmic ? [0.1, 1] : [0, 1]);
  if (logarithmic) return amountScale([least, most], pixels, { isLogarithmic: true });
  const pad = 0.05 * (most - least || Math.abs(most) || 1);
  return linearScale([least - pad, most + pad], pixels);
}

function curve(points, x, y, name) {
  let path = "", isDrawing = false;
  for (const [at, value] of points) {
    const height = value === null ? NaN : y(value);
    if (Number.isFinite(height)) path += `${isDrawing ? "L" : "M"}${x(at).toFixed(1)} ${height.toFixed(1)}`;
    isDrawing = Number.isFinite(height);
  }
  return svgElement("path", { class: `curve ${name}`, d: path, "data-points": points.length });
}

function duration(seconds) {
  if (Math.abs(seconds) < 120) return `${shortNumber(seconds)} s`;
  if (Math.abs(seconds) < 7200) return `${shortNumber(seconds / 60)} min`;
  return `${shortNumber(seconds / 3600)} h`;
}
