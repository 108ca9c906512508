// The knobs for costs: one for a whole rank, one for each part of the model, and all as JSON.

import { byId, element } from "../shared/elements.js";
import { knob } from "./knobs.js";
import { costsOfText } from "./state.js";

const FIELDS = [
  { id: "forward", label: "Forward" },
  { id: "input_grad", label: "Input gradient" },
  { id: "weight_grad", label: "Weight gradient" },
  { id: "transfer", label: "Transfer", usual: 0, max: 1 },
  { id: "activation", label: "Activation", hint: "memory held from forward to backward" },
  { id: "retained", label: "Retained", hint: "the part of it that the weight gradient still needs" },
];
const PER_PART = FIELDS.filter(({ id }) => id !== "transfer");
const SLIDER_END = 4;

/** Fill the knobs for the costs of a rank, for those of each part, and the text. */
export function costKnobs(state, onChange) {
  const shows = [rankKnobs, partKnobs, costsText].map((fill) => fill(state, onChange));
  return () => shows.forEach((show) => show());
}

function rankKnobs(state, onChange) {
  const knobs = FIELDS.map((field) => knob(
    { ...field, min: 0, max: field.max ?? SLIDER_END, step: 0.05 },
    (value) => {
      state.costs[field.id] = value;
      onChange();
    },
  ));
  byId("costs").append(...knobs.map(({ node }) => node));
  return () => knobs.forEach(({ show, node }, i) => {
    const value = valueOf(state, FIELDS[i]);
    node.classList.toggle("varied", Array.isArray(value));
    show(Array.isArray(value) ? meanOf(value) : value);
  });
}

function partKnobs(state, onChange) {
  const choice = byId("stage-field");
  choice.append(...PER_PART.map(({ id, label }) => element("option", { value: id }, label)));
  const field = () => PER_PART.find(({ id }) => id === choice.value);
  let knobs = [];
  const show = () => {
    const value = valueOf(state, field());
    const values = Array.isArray(value) ? value : Array(state.p).fill(value);
    if (knobs.length !== values.length) {
      knobs = values.map((_, part) => knob(
        { id: `stage-${part}`, label: String(part), name: `Part ${part}`, min: 0, max: SLIDER_END, step: 0.05 },
        (turned) => {
          const all = valueOf(state, field());
          const list = Array.isArray(all) ? [...all] : Array(state.p).fill(all);
          list[part] = turned;
          state.costs[field().id] = list;
          onChange();
        },
      ));
      byId("stage-knobs").replaceChildren(...knobs.map(({ node }) => node));
    }
    knobs.forEach((each, part) => each.show(values[part]));
  };
  choice.addEventListener("change", show);
  byId("same").addEventListener("click", () => {
    const value = valueOf(state, field());
    if (Array.isArray(value)) state.costs[field().id] = meanOf(value);
    onChange();
  });
  return show;
}

function costsText(state, onChange) {
  const area = byId("costs-text");
  let applied = ""; // what the text says, in any spacing
  const apply = () => {
    try {
      state.costs = costsOfText(area.value);
    } catch (problem) {
      byId("error").textContent = `the costs are not JSON: ${problem.message}`;
      return;
    }
    applied = JSON.stringify(state.costs);
    onChange();
  };
  byId("apply-costs").addEventListener("click", apply);
  byId("costs-file").addEventListener("change", async ({ target }) => {
    area.value = await target.files[0].text();
    target.value = "";
    apply();
  });
  return () => {
    const current = JSON.stringify(state.costs);
    if (current !== applied) area.value = JSON.stringify(state.costs, null, 1);
    applied = current;
  };
}

/** Return a cost: a number, or a list with one for each part. */
function valueOf(state, { id, usual = 1 }) {
  const given = state.costs[id] ?? (id === "retained" ? state.costs.activation : null);
  return given ?? usual;
}

function meanOf(values) {
  return Number((values.reduce((sum, each) => sum + each, 0) / values.length).toPrecision(4));
}
