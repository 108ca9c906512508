// The search for a schedule: started, watched, stopped.

import { byId } from "../shared/elements.js";
import { post } from "../shared/requests.js";
import { SEARCHED, memoryLimitOf } from "./state.js";

const KINDS = {
  straight: (state) => ({ placement: "straight", memory_limit: memoryLimitOf(state) }),
  v: (state) => ({ placement: "v", memory_limit: memoryLimitOf(state) }),
  zb_1p: ({ p }) => ({ placement: "straight", memory_limit: p }),
  zb_2p: ({ p }) => ({ placement: "straight", memory_limit: 2 * p }),
  zbv: ({ p }) => ({ placement: "v", memory_limit: p }),
};

/** Let the controls search; `onFound` is called when the state has a new result. */
export function searchControls(state, onFound) {
  const [start, stop, status] = ["search-start", "search-stop", "search-status"].map(byId);
  let running = null;

  const search = async (fields) => {
    running = new AbortController();
    start.disabled = true;
    stop.disabled = false;
    status.textContent = "searching";
    try {
      const message = await watched(fields, running.signal);
      status.textContent = message;
      state.search = fields;
      if (!state.shown.some(({ name }) => name === SEARCHED)) {
        state.shown.push({ name: SEARCHED, moves: [] });
      }
    } catch (problem) {
      status.textContent = problem.name === "AbortError" ? "stopped" : problem.message;
    }
    byId("search-progress").value = 0;
    start.disabled = false;
    stop.disabled = true;
    await onFound();
  };
  start.addEventListener("click", () => search({
    num_ranks: state.p,
    num_microbatches: state.m,
    costs: structuredClone(state.costs),
    ...KINDS[byId("search-kind").value](state),
    time_budget: Number(byId("search-seconds").value),
    seed: Number(byId("search-seed").value),
  }));
  stop.addEventListener("click", () => running.abort());
  return search;
}

/** Post a search, show its progress, and return what it says at the end. */
async function watched(fields, signal) {
  const response = await post("api/schedules/search", fields, signal);
  const bar = byId("search-progress");
  let last = {};
  for await (const line of linesOf(response.body)) {
    last = JSON.parse(line);
    if (last.error) throw new Error(last.error);
    if (last.done !== undefined) bar.value = last.done;
  }
  if (last.message === undefined) throw new Error("the search has ended without a result");
  return last.message;
}

async function* linesOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) break;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    yield* lines;
  }
}
