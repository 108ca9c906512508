// Where each rank's time goes in a step, and how much memory it holds: a bar for each rank.

import { element } from "../shared/elements.js";
import { percent, shortNumber } from "../shared/numbers.js";
import { foldedTable } from "../shared/tables.js";
import { formatBytes } from "../shared/units.js";

/** Show stacked bars of the parts of each rank's time. */
export function showRanks(container, { breakdown, parts, measured_step: step }) {
  if (!breakdown.length) {
    container.replaceChildren(element("p", { className: "quiet" }, "No step has been recorded yet."));
    return;
  }
  const totals = breakdown.map((each) => parts.reduce((sum, name) => sum + (each.parts[name] ?? 0), 0));
  const most = Math.max(...totals);
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
    element("p", { className: "quiet" }, `Step ${step}, with the mean time between two steps.`),
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
  const most = Math.max(...memory, ...planned);
  const isComparable = byRank && planned.length === memory.length;
  const shown = memory.length ? memory : planned;
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
  container.replaceChildren(element("p", { className: "quiet" }, `${what}.`), element("div", { className: "bars" }, ...rows));
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
