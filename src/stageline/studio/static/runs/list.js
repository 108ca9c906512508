// The list of runs. Rows are changed in place, so that what has the focus keeps it.

import { element } from "../shared/elements.js";
import { shortNumber } from "../shared/numbers.js";

const HEADS = ["run", "", "status", "step", "loss", "samples/s", "schedule", "ranks", "changed"];
const SECONDS_LIVE = 120; // since its last report: an unfinished run that is silent for longer may be dead

/** A list of runs. State: a row for each. `toggle` and `open` are called with the key of a run. */
export class RunList {
  constructor(container, { toggle, open }) {
    this.rows = new Map();
    this.toggle = toggle;
    this.open = open;
    this.body = element("tbody");
    const head = element("tr", {}, ...HEADS.map((text) => element("th", { scope: "col" }, text)));
    container.replaceChildren(element("table", {}, element("thead", {}, head), this.body));
  }

  /** Show these runs; `colourOf` gives the number of a chosen run's colour. */
  update(runs, now, chosen, opened, colourOf) {
    const keys = new Set(runs.map((run) => run.key));
    for (const key of [...this.rows.keys()]) if (!keys.has(key)) this.remove(key);
    runs.forEach((run, index) => {
      const row = this.rows.get(run.key) ?? this.add(run);
      if (this.body.children[index] !== row.element) this.body.insertBefore(row.element, this.body.children[index] ?? null);
      row.box.checked = chosen.includes(run.key);
      row.swatch.className = row.box.checked ? `swatch run-${colourOf(run.key)}` : "swatch";
      row.button.setAttribute("aria-pressed", String(run.key === opened));
      const live = isLive(run, now);
      row.element.classList.toggle("live", live);
      const texts = [
        live ? "running" : run.status, stepOf(run), numberOf(run.loss), numberOf(run.samples_per_second),
        run.schedule, run.num_ranks ? String(run.num_ranks) : "", ageOf(now - run.updated),
      ];
      texts.forEach((text, column) => {
        if (row.cells[column].textContent !== text) row.cells[column].textContent = text;
      });
    });
  }

  add(run) {
    const box = element("input", { type: "checkbox" });
    const swatch = element("span", { className: "swatch" });
    const button = element("button", { type: "button" }, "Details");
    button.setAttribute("aria-label", `Details of ${run.name}`);
    box.addEventListener("change", () => this.toggle(run.key));
    button.addEventListener("click", () => this.open(run.key));
    const cells = HEADS.slice(2).map(() => element("td"));
    const label = element("label", { title: run.name }, box, swatch, element("span", { className: "name" }, run.name));
    const row = { box, swatch, button, cells };
    row.element = element("tr", {}, element("td", {}, label), element("td", {}, button), ...cells);
    this.rows.set(run.key, row);
    return row;
  }

  remove(key) {
    this.rows.get(key).element.remove();
    this.rows.delete(key);
  }
}

/** Return true if a run is being written. */
export function isLive(run, now) {
  return run.status === "unfinished" && now - run.updated < SECONDS_LIVE;
}

function stepOf(run) {
  return run.steps ? `${run.step} of ${run.steps}` : String(run.step);
}

function numberOf(value) {
  return value === null ? "–" : shortNumber(value);
}

function ageOf(seconds) {
  if (seconds < 90) return "now";
  if (seconds < 5400) return `${Math.round(seconds / 60)} min ago`;
  if (seconds < 129600) return `${Math.round(seconds / 3600)} h ago`;
  return `${Math.round(seconds / 86400)} days ago`;
}
