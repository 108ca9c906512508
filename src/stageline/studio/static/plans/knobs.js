// The knobs: their values in the address, in the form, and in the requests to the studio.

import { byId } from "../shared/elements.js";

const NUMBERS = ["batch_size", "num_devices", "link_speed", "microbatch_size"];
const KNOBS = [...NUMBERS, "memory", "optimizer"];
const CHECKS = ["recompute", "asynchronous"];

/** The ids of all inputs that are knobs. */
export const INPUTS = [...KNOBS, ...CHECKS];

/** The knobs that change the cluster, as they leave it. */
export const AS_DESCRIBED = { num_devices: "", memory: "", link_speed: "1", microbatch_size: "" };

/** The state of the page that an address without a query has. */
export const DEFAULTS = {
  example: "", files: "", batch_size: "", ...AS_DESCRIBED, optimizer: "adamw", recompute: "true",
  asynchronous: "false", way: "", cost: "time", sort: "1",
};

/** Show the state in the form. */
export function showKnobs(state) {
  for (const name of [...KNOBS, "cost", "example"]) byId(name).value = state[name];
  for (const name of CHECKS) byId(name).checked = state[name] === "true";
}

/** Put the form into the state. */
export function readKnobs(state) {
  for (const name of KNOBS) state[name] = byId(name).value.trim();
  for (const name of CHECKS) state[name] = String(byId(name).checked);
}

/** Return the fields of a request; a number that was not given is omitted. */
export function fieldsOf(state) {
  const numbers = NUMBERS.filter((name) => state[name] !== "").map((name) => [name, Number(state[name])]);
  return {
    ...Object.fromEntries(numbers),
    profile: byId("profile").value,
    cluster: byId("cluster").value,
    memory: state.memory,
    optimizer: state.optimizer,
    recompute: state.recompute === "true",
    asynchronous: state.asynchronous === "true",
  };
}
