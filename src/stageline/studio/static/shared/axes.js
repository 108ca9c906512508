// The axes of a chart: ticks, grid lines and titles.

import { digitsOf } from "./numbers.js";
import { svgElement } from "./svg.js";

const PIXELS_BETWEEN_TICKS = 80;

/** Return the axes of a plot in this frame; `format` turns a tick into text with so many digits. */
export function axes(frame, horizontal, vertical) {
  const { left, top, right, bottom } = frame;
  const group = svgElement("g", { class: "axes", "aria-hidden": "true" });
  const steps = horizontal.scale.ticks((right - left) / PIXELS_BETWEEN_TICKS);
  for (const tick of steps) {
    const x = horizontal.scale(tick);
    group.append(
      svgElement("line", { x1: x, x2: x, y1: top, y2: bottom }),
      svgElement("text", { x, y: bottom + 16, "text-anchor": "middle" }, horizontal.format(tick, digitsOf(steps))),
    );
  }
  const levels = vertical.scale.ticks((bottom - top) / (PIXELS_BETWEEN_TICKS / 2));
  for (const tick of levels) {
    const y = vertical.scale(tick);
    group.append(
      svgElement("line", { x1: left, x2: right, y1: y, y2: y }),
      svgElement("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, vertical.format(tick, digitsOf(levels))),
    );
  }
  group.append(
    svgElement("text", { class: "title", x: right, y: bottom + 32, "text-anchor": "end" }, titleOf(horizontal)),
    svgElement("text", { class: "title", x: 4, y: top - 8 }, titleOf(vertical)),
  );
  return group;
}

function titleOf({ title, scale }) {
  return scale.isLogarithmic ? `${title}, logarithmic` : title;
}
