// The knobs for sizes, and the list of schedules.

import { byId, element } from "../shared/elements.js";
import { knob } from "./knobs.js";
import { MOST, SEARCHED } from "./state.js";

const MOST_SHOWN = 8; // schedules, which is also the server's limit
const SIZES = [
  { id: "p", label: "Ranks", min: 1, max: 64, most: MOST.p },
  { id: "m", label: "Micro-batches", min: 1, max: 256, most: MOST.m, hint: "in a mini-batch, up to 1024" },
  { id: "chunks", label: "Stages on rank", min: 1, max: 8, most: MOST.chunks,
    hint: "for interleaved_1f1b, looped_bfs and hanayo" },
  { id: "minibatches", label: "Mini-batches", min: 1, max: 16, most: MOST.minibatches,
    hint: "in a row without a barrier, with optimizer steps" },
];

/** Fill the knobs for sizes; a searched schedule is for the sizes of its search. */
export function sizeKnobs(state, onChange) {
  const knobs = SIZES.map((size) => knob({ ...size, step: 1, isWhole: true }, (value) => {
    if (size.id === "p") resizeCosts(state.costs, state.p, value);
    state[size.id] = value;
    for (const shown of state.shown) shown.moves = [];
    if (size.id === "p" || size.id === "m") removeSearched(state);
    state.view = null;
    onChange();
  }));
  byId("sizes").append(...knobs.map(({ node }) => node));
  return () => knobs.forEach(({ show }, i) => show(state[SIZES[i].id]));
}

/** Fill the list of schedules: those that are checked are shown, in the order of the list. */
export function familyList(families, state, onChange) {
  const names = [...families.map(({ name }) => name), SEARCHED];
  const box = (name, summary) => {
    const input = element("input", { type: "checkbox", value: name });
    input.addEventListener("change", () => {
      state.shown = state.shown.filter((each) => each.name !== name && names.includes(each.name));
      if (input.checked) state.shown.push({ name, moves: [] });
      state.shown.sort((a, b) => names.indexOf(a.name) - names.indexOf(b.name));
      onChange();
    });
    return element("label", { title: summary }, input, ` ${name}`);
  };
  byId("families").append(
    ...families.map(({ name, summary }) => box(name, summary)),
    box(SEARCHED, "the result of the last search below"),
  );
  return () => {
    for (const input of byId("families").querySelectorAll("input")) {
      input.checked = state.shown.some(({ name }) => name === input.value);
      const isFull = !input.checked && state.shown.length >= MOST_SHOWN;
      input.disabled = isFull || (input.value === SEARCHED && !state.search);
    }
  };
}

/** Give costs for each of the ranks' parts as many values as there will be ranks. */
function resizeCosts(costs, before, after) {
  for (const [name, values] of Object.entries(costs)) {
    if (!Array.isArray(values) || values.length !== before) continue;
    costs[name] = Array.from({ length: after }, (_, part) => values[part] ?? values.at(-1));
  }
}

function removeSearched(state) {
  state.search = null;
  state.shown = state.shown.filter(({ name }) => name !== SEARCHED);
}
