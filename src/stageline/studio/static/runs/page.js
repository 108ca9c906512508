// The page of runs: what is chosen is drawn, and drawn again when the files of a run change.

import { readState, writeState } from "../shared/address.js";
import { byId } from "../shared/elements.js";
import { shortNumber } from "../shared/numbers.js";
import { post } from "../shared/requests.js";
import { CurveChart } from "./curves.js";
import { RunList } from "./list.js";
import { StepPicture } from "./overlay.js";
import { omitted, showMemory, showRanks } from "./ranks.js";
import { showEvents, showFacts, showFindings } from "./reports.js";
import { pointsOf } from "./series.js";

const MILLISECONDS_BETWEEN_LOOKS = 1000;
const MOST_CHOSEN = 8; // as many as there are colours
const DEFAULTS = {
  runs: "", details: "", along: "step", smoothing: "0", logarithmic: "false", range: "", zoom: "1",
};

const state = readState(DEFAULTS);
const read = new Map(); // what was read of a run, by its key
const colours = new Map(); // the number of the colour of a chosen run
let runs = [], version = "", now = 0, timer = 0;
let isLooking = false, isLookWanted = false;

const list = new RunList(byId("list"), { toggle, open });
const charts = {
  loss: new CurveChart(byId("loss"), "loss", { zoom, read: readCurves }),
  samples_per_second: new CurveChart(byId("throughput"), "samples per second", { zoom, read: readCurves }),
};
const picture = new StepPicture(byId("step"), {
  read: (text) => { byId("step-reading").textContent = text ?? "Point at an action to read its times."; },
});

function chosen() {
  return state.runs ? state.runs.split(",") : [];
}

function colourOf(key) {
  if (!colours.has(key)) {
    const taken = new Set(chosen().filter((each) => colours.has(each)).map((each) => colours.get(each)));
    colours.set(key, [...Array(MOST_CHOSEN).keys()].find((number) => !taken.has(number)) ?? 0);
  }
  return colours.get(key);
}

function toggle(key) {
  const keys = chosen().includes(key) ? chosen().filter((each) => each !== key) : [...chosen(), key];
  if (!keys.includes(key)) colours.delete(key);
  choose(keys.slice(-MOST_CHOSEN));
}

function open(key) {
  state.details = state.details === key ? "" : key;
  choose(chosen());
}

function choose(keys) {
  state.runs = keys.join(",");
  writeState(state, DEFAULTS);
  showList();
  look();
}

function zoom(range) {
  state.range = range ? range.map((value) => Number(value.toPrecision(6))).join(",") : "";
  writeState(state, DEFAULTS);
  drawCurves();
}

function readCurves(x) {
  for (const chart of Object.values(charts)) chart.mark(x);
  if (x === null) {
    byId("reading").textContent = "";
    return;
  }
  const values = charts.loss.valuesAt(x).map(([name, [at, value]]) => {
    const rate = charts.samples_per_second.valuesAt(at).find(([other]) => other === name);
    const rateText = rate ? `, ${shortNumber(rate[1][1])} samples/s` : "";
    return `${name}: loss ${shortNumber(value)}${rateText}`;
  });
  byId("reading").textContent = `${state.along} ${shortNumber(x)} – ${values.join("; ")}`;
}

function drawCurves() {
  const shown = chosen().filter((key) => read.has(key));
  byId("curves").hidden = !shown.length;
  if (!shown.length) return;
  const [low, high] = state.range.split(",").map(Number);
  const options = {
    range: high > low ? [low, high] : null, smoothing: Number(state.smoothing), along: state.along,
  };
  for (const [name, chart] of Object.entries(charts)) {
    const series = shown.map((key) => ({
      name: runs.find((run) => run.key === key)?.name ?? key,
      colour: colourOf(key),
      points: pointsOf(read.get(key).curves, name, state.along),
    }));
    chart.draw(series, { ...options, logarithmic: name === "loss" && state.logarithmic === "true" });
  }
}

function drawDetails() {
  const details = read.get(state.details)?.details;
  byId("details").hidden = !details;
  if (!details) return;
  byId("details-title").textContent = runs.find((run) => run.key === state.details)?.name ?? "";
  showFacts(byId("facts"), byId("notes"), details);
  showFindings(byId("findings"), details);
  showRanks(byId("ranks"), details);
  showMemory(byId("memory"), details);
  showEvents(byId("events"), details);
  drawStep(details);
}

function drawStep({ measured, predicted, measured_step: step, ...details }) {
  byId("step").hidden = !measured;
  const above = predicted ? `predicted ${shortNumber(predicted.makespan)} ms, above it; ` : "there is no plan to compare with; ";
  byId("step-caption").textContent = measured
    ? `step ${step}: ${above}measured ${shortNumber(measured.makespan)} ms${omitted(measured.rows)}` : "No step has been recorded yet.";
  if (measured) picture.draw({ measured, predicted, ...details }, Number(state.zoom));
}

function showKnobs() {
  for (const name of ["along", "smoothing"]) byId(name).value = state[name];
  byId("zoom-step").value = state.zoom;
  byId("logarithmic").checked = state.logarithmic === "true";
}

/** Look what has changed, and read and draw that. Only one look runs at a time. */
async function look() {
  if (document.hidden) return; // it is looked at again when the page becomes visible
  isLookWanted = true;
  if (isLooking) return;
  clearTimeout(timer);
  isLooking = true;
  while (isLookWanted) {
    isLookWanted = false;
    say(await lookOnce().catch((problem) => problem.message));
  }
  isLooking = false;
  timer = setTimeout(look, MILLISECONDS_BETWEEN_LOOKS);
}

/** Return what is wrong, or ''. */
async function lookOnce() {
  const found = await (await post("api/runs/list", { version })).json();
  now = found.now;
  if (found.runs) runs = found.runs.sort((a, b) => (b.started ?? 0) - (a.started ?? 0) || (a.key < b.key ? -1 : 1));
  if (!state.runs && !state.details && !read.size && runs.length) {
    Object.assign(state, { runs: runs[0].key, details: runs[0].key }); // the latest
  }
  showList();
  const wanted = new Set([...chosen(), ...(state.details ? [state.details] : [])]);
  const missing = [...wanted].filter((key) => !runs.some((run) => run.key === key));
  const changes = await Promise.all([...wanted].filter((key) => !missing.includes(key)).map(readRun));
  version = found.version; // not before all is read: what fails is read again
  if (changes.some(Boolean) || isNew(wanted)) {
    drawCurves();
    drawDetails();
  }
  return missing.length ? `not in this folder: ${missing.join(", ")}` : "";
}

function showList() {
  list.update(runs, now, chosen(), state.details, colourOf);
  byId("empty").hidden = runs.length > 0;
  byId("list").hidden = !runs.length;
}

function say(problem) {
  if (byId("error").textContent !== problem) byId("error").textContent = problem;
}

let drawn = "";

/** Return true if what is to be drawn differs from what was drawn last. */
function isNew(wanted) {
  const text = JSON.stringify([[...wanted], state]);
  const differs = text !== drawn;
  drawn = text;
  return differs;
}

/** Read a run unless it is known in its current version; return true if it was read. */
async function readRun(key) {
  const run = runs.find((each) => each.key === key);
  const known = read.get(key);
  const details = key === state.details;
  if (known?.version === run.version && (known.details || !details)) return false;
  read.set(key, await (await post("api/runs/read", { key, details })).json());
  return true;
}

function listen() {
  for (const name of ["along", "smoothing"]) {
    byId(name).addEventListener("input", () => {
      state[name] = byId(name).value;
      if (name === "along") state.range = ""; // steps are not seconds
      writeState(state, DEFAULTS);
      drawCurves();
    });
  }
  byId("logarithmic").addEventListener("change", () => {
    state.logarithmic = String(byId("logarithmic").checked);
    writeState(state, DEFAULTS);
    drawCurves();
  });
  byId("whole").addEventListener("click", () => zoom(null));
  byId("zoom-step").addEventListener("input", () => {
    state.zoom = byId("zoom-step").value;
    writeState(state, DEFAULTS);
    drawDetails();
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    drawCurves();
    drawDetails();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", drawDetails);
  document.addEventListener("visibilitychange", look);
}

showKnobs();
listen();
look();
