// The axes of a chart: ticks, grid lines and titles.

import { svgElement } from "./svg.js";

const PIXELS_BETWEEN_TICKS = 80;

/** Return the axes of a plot in this frame; `format` turns the value of a tick into text. */
export function axes(frame, horizontal, vertical) {
  const { left, top, right, bottom } = frame;
  const group = svgElement("g", { class: "axes", "aria-hidden": "true" });
  for (const tick of horizontal.scale.ticks((right - left) / PIXELS_BETWEEN_TICKS)) {
    const x = horizontal.scale(tick);
    group.append(
      svgElement("line", { x1: x, x2: x, y1: top, y2: bottom }),
      svgElement("text", { x, y: bottom + 16, "text-anchor": "middle" }, horizontal.format(tick)),
    );
  }
  for (const tick of vertical.scale.ticks((bottom - top) / (PIXELS_BETWEEN_TICKS / 2))) {
    const y = vertical.scale(tick);
    group.append(
      svgElement("line", { x1: left, x2: right, y1: y, y2: y }),
      svgElement("text", { x: left - 6, y: y + 4, "text-anchor": "end" }, vertical.format(tick)),
    );
  }
  group.append(
    svgElement("text", { class: "title", x: right, y: bottom + 32, "text-anchor": "end" }, horizontal.title),
    svgElement("text", { class: "title", x: 4, y: top - 8 }, vertical.title),
  );
  return group;
}
