// All ways as a table, whose columns can be sorted.

import { element } from "../shared/elements.js";
import { memoryOf, timeOf, verdictOf } from "./ways.js";

const COLUMNS = [
  ["way", (way) => way.description],
  ["time of a step", (way) => way.seconds],
  ["peak memory", (way) => (way.fits === null ? Infinity : way.peak_memory)],
  ["result", (way) => way.verdict],
];

/** Show the ways in the order of a column; `choose` is called with the way whose row is chosen. */
export function showTable(container, result, column, { choose, sort }) {
  const value = COLUMNS[column][1];
  const ways = [...result.ways].sort((a, b) => compare(value(a), value(b)));
  const heads = COLUMNS.map(([name], index) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => sort(index));
    return element("th", { scope: "col", "aria-sort": index === column ? "ascending" : "none" }, button);
  });
  const rows = ways.map((way) => {
    const button = element("button", { type: "button", class: "link" }, way.description);
    button.addEventListener("click", () => choose(way));
    const texts = [timeOf(way), memoryOf(way), verdictOf(way, result)];
    return element("tr", {}, element("td", {}, button), ...texts.map((text) => element("td", {}, text)));
  });
  container.replaceChildren(element("table", {},
    element("thead", {}, element("tr", {}, ...heads)), element("tbody", {}, ...rows)));
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}
