// The measures of all timelines as tables, for those who compare, and those who do not see pictures.

import { element } from "../shared/elements.js";
import { percent, shortNumber, signedPercent } from "../shared/numbers.js";
import { numRanks } from "./timeline.js";

const COLUMNS = [
  "schedule", "makespan", "vs. first", "lower bound", "step bubble", "span bubble",
  "peak activations", "peak memory",
];

/** Fill the table that has a row for each timeline. */
export function fillSummary(table, titles, timelines) {
  const first = timelines.find(({ makespan }) => makespan !== undefined);
  const rows = timelines.map((timeline, i) => [titles[i], ...measures(timeline, first)]);
  fill(table, COLUMNS, rows);
}

/** Fill the table that has a row for each rank. */
export function fillRanks(table, titles, timelines) {
  const good = timelines.map((timeline, i) => [titles[i], timeline])
    .filter(([, { error }]) => !error);
  const columns = good.flatMap(([title]) => [`${title}: busy`, "bubble", "peak memory"]);
  const most = Math.max(0, ...good.map(([, timeline]) => numRanks(timeline)));
  const rows = Array.from({ length: most }, (_, rank) => [
    `rank ${rank}`,
    ...good.flatMap(([, timeline]) => (rank < numRanks(timeline) ? [
      timeline.verdict ? "–" : shortNumber(timeline.busy[rank]),
      timeline.makespan ? percent(1 - timeline.busy[rank] / timeline.makespan) : "–",
      shortNumber(timeline.peakMemory[rank]) + (isOver(timeline, rank) ? " (over the limit)" : ""),
    ] : ["", "", ""])),
  ]);
  fill(table, ["rank", ...columns], rows);
}

/** Return whether a rank holds more than its limit, but for rounding. */
export function isOver({ limits, peakMemory }, rank) {
  return limits !== null && peakMemory[rank] > limits[rank] * (1 + 1e-9);
}

function measures(timeline, first) {
  if (timeline.error) return [timeline.error];
  const peaks = [timeline.peakActivations, timeline.peakMemory].map((all) => Math.max(...all));
  const over = timeline.peakMemory.filter((_, rank) => isOver(timeline, rank)).length;
  const memory = `${shortNumber(peaks[1])}${over ? ` (${over} over the limit)` : ""}`;
  const last = [shortNumber(peaks[0]), memory];
  if (timeline.makespan === undefined) return ["deadlock", "–", "–", "–", "–", ...last];
  const isCompared = timeline !== first && first.makespan > 0;
  return [
    shortNumber(timeline.makespan),
    isCompared ? signedPercent(timeline.makespan / first.makespan - 1) : "",
    shortNumber(timeline.lowerBound),
    percent(timeline.stepBubble),
    percent(timeline.spanBubble),
    ...last,
  ];
}

function fill(table, columns, rows) {
  table.replaceChildren(
    element("thead", {}, element("tr", {}, ...columns.map((name) => header(name, "col")))),
    element("tbody", {}, ...rows.map(([name, ...cells]) => element(
      "tr", {}, header(name, "row"),
      ...cells.map((cell) => element("td", cells.length === 1 ? alone(columns) : {}, cell)),
    ))),
  );
}

function header(text, scope) {
  return element("th", { scope }, text);
}

/** Return the properties of a message that takes the place of all measures. */
function alone(columns) {
  return { colSpan: columns.length - 1, className: "message" };
}
