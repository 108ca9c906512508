// What the page says about an action, a wait, and a point in time.

import { shortNumber } from "../shared/numbers.js";
import {
  NOTHING, actionAt, firstAfter, kindInWords, nameOf, numRanks, previousOf, rankOf,
} from "./timeline.js";

const FEW_RANKS = 8;

/** Return an action's name, times, and what it waited for, a line each. */
export function describeAction(timeline, action) {
  const kind = kindInWords(timeline.kinds[timeline.kindOf[action]]);
  const microbatch = timeline.microbatches[action];
  const of = microbatch === NOTHING ? "" : `, micro-batch ${microbatch}`;
  const lines = [
    `${nameOf(timeline, action)}: ${kind}${of}`,
    `stage ${timeline.stages[action]} on rank ${rankOf(timeline, action)}`,
  ];
  if (timeline.neverRun[action]) return [...lines, "never runs: the order does not complete"];
  const [start, end] = [timeline.starts[action], timeline.ends[action]].map(shortNumber);
  return [...lines, `from ${start} to ${end}`, waitOf(timeline, action)];
}

/** Return why a rank is idle at a time. */
export function describeWait(timeline, rank, time) {
  const next = firstAfter(timeline, rank, time);
  if (next === timeline.rowStarts[rank + 1]) return [`rank ${rank} has nothing left to do`];
  const previous = previousOf(timeline, next);
  const since = previous === NOTHING ? 0 : timeline.ends[previous];
  const [from, to] = [since, timeline.starts[next]].map(shortNumber);
  return [`rank ${rank} waits from ${from} to ${to}`, waitOf(timeline, next)];
}

/** Return what each rank runs at a time, or how many do. */
export function describeTime(timeline, time) {
  const running = Array.from({ length: numRanks(timeline) }, (_, rank) => actionAt(timeline, rank, time));
  if (running.length > FEW_RANKS) {
    return `${running.filter((action) => action !== NOTHING).length} of ${running.length} ranks work`;
  }
  return running.map((action) => (action === NOTHING ? "idle" : nameOf(timeline, action))).join(" · ");
}

function waitOf(timeline, action) {
  const needed = timeline.waitsFor[action];
  if (needed === NOTHING) return "needs no other action";
  const name = nameOf(timeline, needed);
  if (timeline.neverRun[needed]) return `needs ${name}, which never runs`;
  return `needs ${name}, which ends at ${shortNumber(timeline.ends[needed])}`;
}
