// What a way to train is called, and what is said about it.

import { element } from "../shared/elements.js";
import { percent, shortNumber } from "../shared/numbers.js";
import { counted, formatBytes, formatSeconds } from "../shared/units.js";

const PRECISION = {
  simulated: "simulated with all micro-batches",
  estimated: "estimated from few micro-batches",
  bound: "a lower bound: too long to simulate beside the others",
};

/** Return true if a way is the best that fits. */
export function isBest(way, result) {
  return result.has_best && way === result.ways[0];
}

/** Return the time of a way as text, and whether it is exact. */
export function timeOf(way) {
  const sign = { simulated: "", estimated: "≈ ", bound: "≥ " }[way.precision];
  return sign + formatSeconds(way.seconds);
}

/** Return the peak memory of a way as text. */
export function memoryOf(way) {
  return way.fits === null ? "not known" : formatBytes(way.peak_memory);
}

/** Return why a way lost. */
export function verdictOf(way, result) {
  return isBest(way, result) ? "the best" : way.verdict;
}

/** Return a way in one line, for screen readers. */
export function labelOf(way, result) {
  return `${way.description}: ${timeOf(way)}, ${memoryOf(way)}, ${verdictOf(way, result)}`;
}

/** Show a way: its description, its expected time and memory, and why it lost. */
export function showWay(container, way, result) {
  const rate = way.seconds ? shortNumber(result.batch_size / way.seconds) : "–";
  const facts = [
    ["time of a step", `${timeOf(way)} (${PRECISION[way.precision]})`],
    ["samples per second", rate],
    ["peak memory", `${memoryOf(way)} of ${formatBytes(result.memory)}`],
    ["idle", way.precision === "bound" ? "not known" : percent(way.bubble)],
    ["cut", counted(way.balance.length, "stage")],
  ];
  const list = element("dl", {});
  for (const [name, value] of facts) {
    list.append(element("div", {}, element("dt", {}, name), element("dd", {}, value)));
  }
  const verdict = element("p", { className: way.fits === false ? "verdict lost" : "verdict" });
  verdict.append(isBest(way, result) ? "★ the best of all ways that fit" : `It lost: ${way.verdict}`);
  container.replaceChildren(element("p", { className: "name" }, way.description), verdict, list);
}
