// What the page shows, and its form in the address.
//
//   show=1f1b+zb_h1*0.5.3     schedules; *0.5.3 moves action 5 of rank 0 to position 3
//   costs={"forward":1.5}     as in a file of costs
//   search={…}                the fields of the search whose result is shown
//   view=10+20  time=12       the visible times, and the time that is stepped through

import { readState, writeState } from "../shared/address.js";

export const SEARCHED = "searched";
export const MOST = { p: 64, m: 1024, chunks: 8, minibatches: 64 }; // which are also the server's limits
const LONGEST = 6000; // characters of one part of the address; longer ones are left out
const DEFAULTS = {
  p: "4", m: "8", chunks: "2", minibatches: "1", show: "1f1b zb_h1",
  costs: "{}", memory: "", search: "", view: "", time: "",
};

/** Return the state in the address; parts that cannot be read are as by default. */
export function stateOfAddress() {
  const text = readState(DEFAULTS);
  const search = parsed(text.search, JSON.parse, null);
  return {
    ...Object.fromEntries(Object.keys(MOST).map((name) => [name, size(text[name], name)])),
    shown: text.show.split(" ").filter(Boolean).map(shownOfText)
      .filter(({ name }) => name !== SEARCHED || search),
    costs: parsed(text.costs, costsOfText, {}),
    memory: text.memory,
    search,
    view: viewOfText(text.view),
    time: text.time === "" ? null : Number(text.time) || 0,
  };
}

/** Put a state into the address; return the names of parts that are too long for it. */
export function putIntoAddress(state) {
  const texts = {
    p: state.p, m: state.m, chunks: state.chunks, minibatches: state.minibatches,
    show: state.shown.map(textOfShown).join(" "),
    costs: JSON.stringify(state.costs),
    memory: state.memory,
    search: state.search ? JSON.stringify(state.search) : "",
    view: state.view ? `${state.view.from} ${state.view.to}` : "",
    time: state.time ?? "",
  };
  const long = Object.keys(texts).filter((name) => String(texts[name]).length > LONGEST);
  for (const name of long) texts[name] = DEFAULTS[name];
  writeState(texts, DEFAULTS);
  return long;
}

/** Return the fields of the request for one of the shown schedules. */
export function requestOf(state, { name, moves }) {
  if (name === SEARCHED) {
    const { num_ranks, num_microbatches } = state.search;
    return { search: state.search, num_ranks, num_microbatches, moves };
  }
  return {
    family: name,
    num_ranks: state.p,
    num_microbatches: state.m,
    chunks_per_rank: state.chunks,
    num_minibatches: state.minibatches,
    moves,
  };
}

/** Return the costs in a text; throw an error if it is not a JSON object. */
export function costsOfText(text) {
  const costs = JSON.parse(text.trim() || "{}");
  if (costs?.constructor !== Object) throw new Error("an object such as {\"forward\": 1.5} is needed");
  return costs;
}

/** Return the memory limit as the server reads it: a number of micro-batches, or text with bytes. */
export function memoryLimitOf(state) {
  const text = state.memory.trim();
  if (text === "") return null;
  return Number.isFinite(Number(text)) ? Number(text) : text;
}

function shownOfText(text) {
  const [name, ...moves] = text.split("*");
  return { name, moves: moves.map((move) => move.split(".").map(Number)) };
}

function textOfShown({ name, moves }) {
  return [name, ...moves.map((move) => move.join("."))].join("*");
}

function viewOfText(text) {
  const [from, to] = text.split(" ").map(Number);
  return from < to ? { from, to } : null;
}

function size(text, name) {
  const value = Number(text);
  return Number.isInteger(value) && value > 0 && value <= MOST[name] ? value : Number(DEFAULTS[name]);
}

function parsed(text, parse, otherwise) {
  try {
    return text ? parse(text) : otherwise;
  } catch {
    return otherwise;
  }
}
