// All ways as a table, whose columns can be sorted.

import { element } from "../shared/elements.js";
import { table } from "../shared/tables.js";
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
  const rows = ways.map((way) => {
    const button = element("button", { type: "button", className: "link" }, way.description);
    button.addEventListener("click", () => choose(way));
    return [button, timeOf(way), memoryOf(way), verdictOf(way, result)];
  });
  const heads = COLUMNS.map(([name], index) => {
    const button = element("button", { type: "button" }, name);
    button.addEventListener("click", () => sort(index));
    return button;
  });
  const made = table(heads, rows);
  made.querySelectorAll("th")[column].setAttribute("aria-sort", "ascending");
  container.replaceChildren(made);
}

function compare(a, b) {
  return typeof a === "string" ? a.localeCompare(b) : a - b;
}
