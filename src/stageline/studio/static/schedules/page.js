// The page of schedules: the knobs turn a state, the server times it, the board draws it.

import { byId, element, setText } from "../shared/elements.js";
import { post } from "../shared/requests.js";
import { Board, cellOf } from "./board.js";
import { costKnobs } from "./costs.js";
import { decodeTimelines } from "./decode.js";
import { makeFigure, updateFigure } from "./figure.js";
import { followKeys } from "./keys.js";
import { fillLegend } from "./legend.js";
import { timeControls } from "./player.js";
import { followPointer } from "./pointer.js";
import { searchControls } from "./search.js";
import { familyList, sizeKnobs } from "./sizes.js";
import { SEARCHED, memoryLimitOf, putIntoAddress, requestOf, stateOfAddress } from "./state.js";
import { fillRanks, fillSummary } from "./summary.js";
import { NOTHING } from "./timeline.js";
import { describeAction, describeWait } from "./words.js";

const ADDRESS_DELAY = 300; // ms after the last change: browsers limit how often it may change
const ZOOM = 1.5;

const state = stateOfAddress();
const board = new Board(state);
const figures = new Map(); // by the name of the schedule
let isAsking = false;
let isAskedAgain = false;
let addressTimer = 0;
let problem = ""; // of the last request

const act = {
  isEditing: () => byId("edit").getAttribute("aria-pressed") === "true",
  tell,
  move(figure, action, target) {
    const { rank, position } = cellOf(figure.timeline, action);
    if (position === target) return;
    shownOf(figure).moves.push([rank, position, target]);
    board.select(figure, figure.timeline.rowStarts[rank] + target);
    onChange();
  },
  undo(figure) {
    if (shownOf(figure).moves.pop()) onChange();
  },
  reset(figure) {
    shownOf(figure).moves = [];
    onChange();
  },
  requestOf: (name) => ({
    schedule: requestOf(state, state.shown.find((each) => each.name === name)),
    costs: state.costs,
  }),
  onError: (problem) => showError(problem.message),
};

/** Ask for the timelines of the state. While an answer is awaited, only the last change counts. */
async function ask() {
  isAskedAgain = true;
  if (isAsking) return;
  isAsking = true;
  while (isAskedAgain) {
    isAskedAgain = false;
    const shown = state.shown.map(({ name, moves }) => ({ name, moves: [...moves] }));
    try {
      const response = await post("api/schedules/pictures", {
        schedules: shown.map((each) => requestOf(state, each)),
        costs: state.costs,
        memory_limit: memoryLimitOf(state),
      });
      show(shown, decodeTimelines(await response.arrayBuffer()));
      showError("");
    } catch (problem) {
      showProblem(shown, problem.message);
    }
  }
  isAsking = false;
}

/** Keep the pictures beside a message; if there are none, put it where they would be. */
function showProblem(shown, message) {
  if (board.figures.length || !shown.length) showError(message);
  else show(shown, shown.map(({ name }) => ({ name, error: message })));
}

function show(shown, timelines) {
  const current = shown.map(({ name, moves }, i) => {
    if (!figures.has(name)) {
      const made = makeFigure(name, act);
      followPointer(board, made, act);
      followKeys(board, made, act);
      figures.set(name, made);
    }
    updateFigure(figures.get(name), timelines[i], moves.length);
    return figures.get(name);
  });
  const sections = current.map(({ section }) => section);
  const host = byId("figures");
  if (sections.some((section, i) => section !== host.children[i])
    || sections.length !== host.children.length) host.replaceChildren(...sections);
  board.show(current.filter(({ timeline }) => !timeline.error));
  fillSummary(byId("summary"), current.map(({ title }) => title), timelines);
  fillRanks(byId("rank-table"), current.map(({ title }) => title), timelines);
  fillLegend(byId("legend"), timelines);
  showTime();
}

function shownOf(figure) {
  return state.shown.find(({ name }) => name === figure.name);
}

function onChange() {
  for (const showKnob of knobs) showKnob();
  saveAddress();
  return ask();
}

/** Put the state into the address, a moment after the last change. */
function saveAddress() {
  clearTimeout(addressTimer);
  addressTimer = setTimeout(() => {
    const long = putIntoAddress(state);
    byId("address-note").textContent = long.length
      ? `The address does not hold ${long.join(", ")}: too long for a link.` : "";
  }, ADDRESS_DELAY);
}

function showError(message) {
  problem = message;
  showProblems();
}

/** Explain the number that cannot be used, if there is one, and else what the last request found. */
function showProblems() {
  const field = byId("knobs").querySelector("[aria-invalid=true]");
  setText(byId("error"), field?.validationMessage || problem);
}

/** Show what is under the pointer beside it. */
function tell(place, { clientX, clientY }) {
  const tip = byId("tip");
  tip.hidden = !place;
  if (!place) return;
  const { figure: { timeline }, action, rank, time } = place;
  const lines = action === NOTHING
    ? describeWait(timeline, rank, time) : describeAction(timeline, action);
  tip.textContent = lines.join("\n");
  tip.style.left = `${Math.max(4, Math.min(clientX + 14, innerWidth - tip.offsetWidth - 8))}px`;
  const below = clientY + 18;
  const fits = below + tip.offsetHeight < innerHeight;
  tip.style.top = `${fits ? below : clientY - tip.offsetHeight - 10}px`;
}

function memoryKnob() {
  const field = element("input", {
    id: "memory", size: 8, placeholder: "none", value: state.memory,
    title: "micro-batches on each rank, or bytes such as 22GiB",
  });
  field.addEventListener("input", () => {
    state.memory = field.value;
    onChange();
  });
  byId("costs").append(element(
    "div", { className: "knob" }, element("label", { htmlFor: "memory" }, "Memory limit"), field,
  ));
}

function connectToolbar() {
  byId("zoom-in").addEventListener("click", () => board.zoom(1 / ZOOM));
  byId("zoom-out").addEventListener("click", () => board.zoom(ZOOM));
  byId("fit").addEventListener("click", () => board.fit());
  byId("edit").addEventListener("click", ({ target }) => {
    target.setAttribute("aria-pressed", String(!act.isEditing()));
    byId("figures").classList.toggle("editing", act.isEditing());
  });
  byId("knobs").addEventListener("input", showProblems); // after the knob has looked at it
  byId("knobs").addEventListener("submit", (event) => event.preventDefault());
  byId("figures").addEventListener("drawn", () => {
    const { selected } = board;
    setText(byId("selected"), selected
      ? describeAction(selected.figure.timeline, selected.action).join(", ") : "");
    saveAddress();
  });
}

const families = await (await fetch("api/schedules/families")).json();
const knobs = [
  sizeKnobs(state, onChange),
  familyList(families, state, onChange),
  costKnobs(state, onChange),
];
memoryKnob();
connectToolbar();
const showTime = timeControls(board, saveAddress);
const search = searchControls(state, onChange);
for (const showKnob of knobs) showKnob();
if (state.shown.some(({ name }) => name === SEARCHED)) await search(state.search);
else await ask();
