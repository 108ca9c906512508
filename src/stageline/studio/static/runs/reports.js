// What is known of a run as text: how it was made, findings, and what happened.

import { element } from "../shared/elements.js";
import { table } from "../shared/tables.js";

/** Show the configuration of a run, and what of its folder could not be read. */
export function showFacts(list, notes, details) {
  list.replaceChildren(...Object.entries(details.facts).map(([name, value]) =>
    element("div", {}, element("dt", {}, name), element("dd", {}, value))));
  notes.replaceChildren(...details.notes.map((note) => element("li", {}, note)));
}

/** Show what would make a run faster, with the expected gain. */
export function showFindings(container, { findings, measured }) {
  if (!findings.length) {
    const why = measured ? "Nothing was found that would make a step at least 3 % faster." : "A step has to be recorded first.";
    container.replaceChildren(element("p", { className: "quiet" }, why));
    return;
  }
  container.replaceChildren(element("ul", { className: "findings" }, ...findings.map((each) =>
    element("li", {},
      element("strong", {}, each.title),
      element("span", { className: "gain" }, each.gain === null ? "" : `a step takes ${each.gain.toFixed(0)} % less time`),
      element("p", {}, each.measured),
      element("p", { className: "advice" }, each.advice)))));
}

/** Show errors, warnings, checkpoints and other events, the last first. */
export function showEvents(container, { events, checkpoints }) {
  const kept = checkpoints.length ? `Checkpoints in the folder: ${checkpoints.join(", ")}.` : "There are no checkpoints in the folder.";
  const rows = events.map((event) => [event.kind, String(event.step), timeOf(event.time), event.message]);
  const made = table(["event", "step", "time", "message"], rows);
  events.forEach((event, index) => {
    const name = event.is_error ? "error-row" : event.is_warning ? "warning-row" : "";
    made.tBodies[0].rows[index].className = name;
  });
  const scroll = element("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: "Events" } }, made);
  container.replaceChildren(element("p", { className: "quiet" }, kept), ...(events.length ? [scroll] : []));
}

function timeOf(seconds) {
  const date = new Date(1000 * seconds);
  return Number.isNaN(date.getTime()) ? "" : date.toLocaleString("en-GB");
}
