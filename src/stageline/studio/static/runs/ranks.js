// Where each rank's time goes in a step, and how much memory it holds: a bar for each rank.

import { element } from "../shared/elements.js";
import { percent, shortNumber } from "../shared/numbers.js";
import { extentOf } from "../shared/scales.js";
import { foldedTable } from "../shared/tables.js";
import { formatBytes } from "../shared/units.js";

/** As many ranks are shown; a browser limits the height of pictures. */
export const MOST_RANKS = 400;

/** Show stacked bars of the parts of each rank's time. */
export function showRanks(container, { breakdown: all, parts, measured_step: step }) {
  const breakdown = all.slice(0, MOST_RANKS);
  if (!breakdown.length) {
    container.replaceChildren(element("p", { className: "quiet" }, "No step has been recorded yet."));
    return;
  }
  const totals = breakdown.map((each) => parts.reduce((sum, name) => sum + (each.parts[name] ?? 0), 0));
  const [, most] = extentOf(totals);
  const used = parts.filter((name) => breakdown.some((each) => each.parts[name]));
  const number = (name) => parts.indexOf(name);
  const rows = breakdown.map(({ rank, parts: times }, index) => {
    const bar = element("div", { className: "bar" });
    for (const name of used.filter((name) => times[name])) {
      const title = `rank ${rank}, ${name}: ${shortNumber(times[name])} ms, ${percent(times[name] / totals[index])}`;
      const part = element("span", { className: `part part-${number(name)}`, title });
      part.style.width = `${100 * times[name] / (most || 1)}%`;
      bar.append(part);
    }
    return barRow(rank, bar, `${shortNumber(totals[index])} ms`);
  });
  const legend = element("ul", { className: "legend" }, ...used.map((name) =>
    element("li", {}, element("span", { className: `swatch part-${number(name)}` }), name)));
  const cells = breakdown.map(({ rank, parts: times }, index) =>
    [String(rank), ...used.map((name) => shortNumber(times[name] ?? 0)), shortNumber(totals[index])]);
  keepOpen(container, [
    element("p", { className: "quiet" }, `Step ${step}, with the mean time between two steps${omitted(all)}.`),
    legend, element("div", { className: "bars", aria: { hidden: "true" } }, ...rows),
    foldedTable("Times as a table, in ms", ["rank", ...used, "in all"], cells),
  ]);
}

/** Show the peak memory of each rank or process over what the plan expected. */
export function showMemory(container, { memory, planned_memory: planned, is_memory_by_rank: byRank }) {
  if (!memory.length && !planned.length) {
    container.replaceChildren(element("p", { className: "quiet" }, "No memory has been reported yet."));
    return;
  }
  const [, most] = extentOf([...memory, ...planned]);
  const isComparable = byRank && planned.length === memory.length;
  const all = memory.length ? memory : planned;
  const shown = all.slice(0, MOST_RANKS);
  const rows = shown.map((bytes, index) => {
    const bar = element("div", { className: "bar" });
    const part = element("span", { className: memory.length ? "part held" : "part planned" });
    part.style.width = `${100 * bytes / (most || 1)}%`;
    bar.append(part);
    if (isComparable) {
      const mark = element("span", { className: "mark", title: `planned: ${formatBytes(planned[index])}` });
      mark.style.left = `${100 * planned[index] / (most || 1)}%`;
      bar.append(mark);
    }
    const text = isComparable ? `${formatBytes(bytes)}, planned ${formatBytes(planned[index])}` : formatBytes(bytes);
    return barRow(index, bar, text, byRank || !memory.length ? "rank" : "process");
  });
  const what = memory.length
    ? "Peak of each " + (byRank ? "rank" : "process: ranks that are threads share one, and without an accelerator it is all of the process")
    : "As the plan expects it; none has been reported yet";
  container.replaceChildren(element("p", { className: "quiet" }, `${what}${omitted(all)}.`), element("div", { className: "bars" }, ...rows));
}

/** Return what to say if not all ranks are shown. */
export function omitted(ranks) {
  return ranks.length > MOST_RANKS ? `; the first ${MOST_RANKS} of ${ranks.length.toLocaleString("en")} are shown` : "";
}

function barRow(number, bar, text, noun = "rank") {
  return element("div", { className: "bar-row" },
    element("span", { className: "bar-name" }, `${noun} ${number}`), bar, element("span", { className: "bar-text" }, text));
}

/** Replace what a container has; its folded tables stay open. */
function keepOpen(container, children) {
  const wasOpen = container.querySelector("details")?.open ?? false;
  container.replaceChildren(...children);
  container.querySelector("details").open = wasOpen;
}
