// All ways as points: time of a step against peak memory, with the memory of a device as a line.

import { axes } from "../shared/axes.js";
import { roving } from "../shared/roving.js";
import { amountScale, extentOf } from "../shared/scales.js";
import { svgElement } from "../shared/svg.js";
import { formatBytes, formatSeconds } from "../shared/units.js";
import { isBest, labelOf } from "./ways.js";

const HEIGHT = 380;
const MARGIN = { left: 64, top: 28, right: 16, bottom: 44 };
const STAR = "M0-9 2.6-3 9-2.6 4-1.4-2 4.6 5.6 8 0 4.6-5.6 8-4-1.4-9-2.6-2.6-3Z";
const CROSS = "M-3.5-3.5 3.5 3.5M-3.5 3.5 3.5-3.5";

/** Draw the ways; `show` is called with the way under the pointer, `choose` with a clicked one. */
export function drawScatter(container, result, chosen, { show, choose }) {
  const width = Math.max(280, container.clientWidth);
  const frame = {
    left: MARGIN.left, top: MARGIN.top, right: width - MARGIN.right, bottom: HEIGHT - MARGIN.bottom,
  };
  const ways = result.ways.filter((way) => way.fits !== null);
  const x = amountScale(extentOf(ways.map((way) => way.seconds)) ?? [0, 1], [frame.left, frame.right]);
  const memory = [...ways.map((way) => way.peak_memory), result.memory];
  const y = amountScale(extentOf(memory), [frame.bottom, frame.top], { inBytes: true });
  const svg = svgElement("svg", {
    class: "chart", width, height: HEIGHT, role: "group",
    "aria-label": "Ways to train: time of a step against peak memory. Arrow keys move by time.",
  });
  svg.append(
    axes(
      frame,
      { scale: x, format: (seconds, digits) => formatSeconds(seconds, digits), title: "time of a step" },
      { scale: y, format: (bytes) => formatBytes(bytes, 3), title: "peak memory of the fullest rank" },
    ),
    memoryLimit(frame, y(result.memory), result.memory),
  );
  const points = ways.map((way) => point(way, result, x(way.seconds), y(way.peak_memory)));
  points.forEach((element, index) => {
    const way = ways[index];
    element.classList.toggle("chosen", way === chosen);
    element.addEventListener("pointerenter", () => show(way));
    element.addEventListener("pointerleave", () => show(null));
    element.addEventListener("click", () => choose(way));
    element.addEventListener("focus", () => show(way));
    element.addEventListener("blur", () => show(null));
    element.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" && event.key !== " ") return;
      event.preventDefault();
      choose(way);
    });
  });
  const byTime = ways.map((way, index) => [way.seconds, index]).sort((a, b) => a[0] - b[0]);
  const current = byTime.findIndex(([, index]) => ways[index] === chosen);
  roving(byTime.map(([, index]) => points[index]), Math.max(0, current));
  svg.append(...points.toReversed()); // the best is drawn last, over the others
  container.replaceChildren(svg);
}

/** Mark another way as the chosen one. */
export function markChosen(container, way) {
  for (const each of container.querySelectorAll(".way")) {
    each.classList.toggle("chosen", each.dataset.way === way.description);
  }
}

function point(way, result, x, y) {
  const kind = isBest(way, result) ? "best" : way.fits ? way.precision : "lost";
  const shape = kind === "best" ? svgElement("path", { d: STAR })
    : kind === "lost" ? svgElement("path", { d: CROSS })
      : svgElement("circle", { r: 4 });
  const area = svgElement("circle", { class: "area", r: 9 });
  const group = svgElement("g", {
    class: `way ${kind}`, transform: `translate(${x} ${y})`, role: "button",
    "aria-label": labelOf(way, result), "data-way": way.description,
  }, area, shape);
  return group;
}

function memoryLimit({ left, right, top }, y, memory) {
  const isLow = y - 6 > top + 12;
  return svgElement("g", { class: "limit" },
    svgElement("line", { x1: left, x2: right, y1: y, y2: y }),
    svgElement("text", { x: right - 4, y: isLow ? y - 6 : y + 14, "text-anchor": "end" },
      `memory of a device: ${formatBytes(memory)}`),
  );
}
