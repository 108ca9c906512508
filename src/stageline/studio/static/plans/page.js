// The page of plans: inputs and knobs lead to a comparison of all ways, which is then shown.

import { readState, writeState } from "../shared/address.js";
import { byId, element } from "../shared/elements.js";
import { counted, formatBytes, formatSeconds } from "../shared/units.js";
import { keep, kept, listExamples, readExample } from "./inputs.js";
import { AS_DESCRIBED, DEFAULTS, fieldsOf, INPUTS, readKnobs, showKnobs } from "./knobs.js";
import { drawLayers } from "./layers.js";
import { drawScatter, markChosen } from "./scatter.js";
import { search } from "./search.js";
import { showTable } from "./table.js";
import { showWay } from "./ways.js";

const FIRST_EXAMPLE = "gpt-1.3b";
const MILLISECONDS_BEFORE_COMPARING = 250;
const MILLISECONDS_BEFORE_PROGRESS = 400;

const state = readState(DEFAULTS);
let result = null;
let running = null; // the AbortController of the comparison that runs
let timer = 0;
let areTextsNew = false; // and not kept yet

async function loadExample(name) {
  const example = await readExample(name);
  byId("profile").value = example.profile;
  byId("cluster").value = example.cluster;
  state.batch_size ||= String(example.batch_size);
  Object.assign(state, { example: name, files: "" });
  showKnobs(state);
  showOrigin("This example is computed from formulas. A link holds its name and all knobs.");
}

async function useTexts() {
  areTextsNew = false;
  const texts = { profile: byId("profile").value, cluster: byId("cluster").value };
  Object.assign(state, { example: "", files: await keep(texts) });
  byId("example").value = "";
  showOrigin(state.files
    ? "Your profile and cluster stay in this tab: a link holds the knobs and a fingerprint of them, so it " +
      "restores them here, but not in another browser."
    : "Your profile and cluster are too long for this tab to keep: load them again after a reload.");
}

function showOrigin(text) {
  byId("origin").textContent = text;
  byId("num_devices").placeholder = described("num_devices");
  byId("memory").placeholder = described("memory");
}

function described(name) {
  try {
    const value = JSON.parse(byId("cluster").value)[name] ?? "";
    return name === "memory" && value > 0 ? formatBytes(Number(value)) : String(value);
  } catch {
    return "";
  }
}

function compareSoon() {
  clearTimeout(timer);
  timer = setTimeout(async () => {
    if (areTextsNew) await useTexts();
    writeState(state, DEFAULTS);
    await compareNow();
  }, MILLISECONDS_BEFORE_COMPARING);
}

async function compareNow() {
  clearTimeout(timer);
  await run("compare", (found) => {
    result = found;
    byId("error").textContent = "";
    byId("progress").textContent = `${counted(result.num_ways, "way")} in ${formatSeconds(result.seconds, 2)}`;
    showResult();
  }, () => byId("result").classList.add("outdated"));
}

async function savePlan() {
  await run("save", ({ file }) => {
    byId("progress").textContent = "plan.json was saved";
    const address = URL.createObjectURL(new Blob([file], { type: "application/json" }));
    element("a", { href: address, download: "plan.json" }).click();
    setTimeout(() => URL.revokeObjectURL(address), 1000);
  });
}

/** Run a search of a kind and use its result; it replaces the one that runs. */
async function run(kind, use, fail = () => {}) {
  running?.abort();
  const mine = new AbortController();
  running = mine;
  const delay = setTimeout(() => { byId("cancel").hidden = false; }, MILLISECONDS_BEFORE_PROGRESS);
  const say = (text) => { if (!byId("cancel").hidden) byId("progress").textContent = `planning: ${text}`; };
  document.body.setAttribute("aria-busy", "true");
  byId("error").textContent = ""; // it was about what the inputs were before
  try {
    use(await search(kind, fieldsOf(state), say, mine.signal));
  } catch (problem) {
    if (running !== mine) return; // a later search has begun
    const isCancelled = problem.name === "AbortError";
    byId("progress").textContent = isCancelled ? "cancelled" : "";
    byId("error").textContent = isCancelled ? "" : problem.message;
    fail();
  } finally {
    clearTimeout(delay);
    if (running === mine) {
      byId("cancel").hidden = true;
      document.body.removeAttribute("aria-busy");
    }
  }
}

function showResult() {
  byId("result").hidden = !result.ways.length;
  byId("result").classList.remove("outdated");
  const { ways, num_ways: total, message, layers, cluster } = result;
  byId("error").textContent = message;
  byId("save").disabled = !result.has_best;
  const omitted = total > ways.length ? `, of which the first ${ways.length.toLocaleString("en")} are shown` : "";
  const bounds = ways.filter((way) => way.fits === null).length;
  const hidden = bounds ? `; ${counted(bounds, "way")} would take long to simulate and are only in the table` : "";
  byId("summary").textContent = `${counted(layers.names.length, "layer")} on ${cluster.split("\n")[0]}: ` +
    `${counted(total, "way")}${omitted}${hidden}.`;
  byId("cost-note").textContent = `of a micro-batch of ${counted(layers.samples, "sample")}`;
  draw();
}

function chosenWay() {
  return result.ways.find((way) => way.description === state.way) ?? result.ways[0];
}

function draw() {
  if (!result?.ways.length) return;
  drawScatter(byId("scatter"), result, chosenWay(), { show, choose });
  showTable(byId("table"), result, Number(state.sort), { choose, sort });
  show(null);
}

function show(way) {
  const shown = way ?? chosenWay();
  showWay(byId("way"), shown, result);
  drawLayers(byId("layers"), result, shown, state.cost);
}

function choose(way) {
  state.way = way === result.ways[0] ? "" : way.description;
  writeState(state, DEFAULTS);
  markChosen(byId("scatter"), way);
  show(way);
}

function sort(column) {
  state.sort = String(column);
  writeState(state, DEFAULTS);
  showTable(byId("table"), result, column, { choose, sort });
  byId("table").querySelectorAll("th button")[column].focus();
}

function changeTexts() {
  areTextsNew = true;
  compareSoon();
}

async function readFile(event, name) {
  const [file] = event.target.files;
  if (!file) return;
  byId(name).value = await file.text();
  event.target.value = ""; // so that the same file can be chosen again
  changeTexts();
}

function listen() {
  byId("inputs").addEventListener("submit", (event) => event.preventDefault());
  for (const name of INPUTS) {
    byId(name).addEventListener("input", () => { readKnobs(state); compareSoon(); });
  }
  for (const name of ["profile", "cluster"]) {
    byId(`${name}-file`).addEventListener("change", (event) => readFile(event, name));
    byId(name).addEventListener("input", changeTexts);
  }
  byId("load").addEventListener("click", () => {
    const name = byId("example").value || FIRST_EXAMPLE;
    Object.assign(state, DEFAULTS, { cost: state.cost, sort: state.sort });
    start(() => loadExample(name));
  });
  byId("reset").addEventListener("click", () => {
    Object.assign(state, AS_DESCRIBED);
    showKnobs(state);
    compareSoon();
  });
  byId("save").addEventListener("click", savePlan);
  byId("cancel").addEventListener("click", () => running.abort());
  byId("cost").addEventListener("change", () => {
    state.cost = byId("cost").value;
    writeState(state, DEFAULTS);
    if (result) show(null);
  });
  let width = innerWidth;
  addEventListener("resize", () => {
    if (innerWidth === width) return;
    width = innerWidth;
    draw();
  });
}

/** Load texts and compare; inputs wait, so that what is loaded replaces nothing typed meanwhile. */
async function start(load) {
  enable(false);
  try {
    await load();
    writeState(state, DEFAULTS);
    compareNow();
  } catch (problem) {
    byId("error").textContent = problem.message;
  }
  enable(true);
}

function enable(isEnabled) {
  for (const fields of document.querySelectorAll("fieldset")) fields.disabled = !isEnabled;
}

async function restore() {
  for (const { name, title } of await listExamples()) {
    byId("example").append(element("option", { value: name }, title));
  }
  const texts = state.files && kept(state.files);
  if (state.files && !texts) {
    throw new Error("this link was made with a profile of another tab: load the profile and the cluster again");
  }
  if (!texts) return loadExample(state.example || FIRST_EXAMPLE);
  byId("profile").value = texts.profile;
  byId("cluster").value = texts.cluster;
  return useTexts();
}

showKnobs(state);
listen();
start(restore);
