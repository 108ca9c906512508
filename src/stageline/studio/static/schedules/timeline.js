// Questions about a timeline: its actions are numbered rank by rank, in the order of each rank.

export const NOTHING = -1;
const WORDS = {
  F: "forward", I: "input gradient", W: "weight gradient", B: "backward", STEP: "optimizer step",
};

/** Return what a kind of action is, in words. */
export function kindInWords(kind) {
  return WORDS[kind];
}

/** Return the number of ranks. */
export function numRanks(timeline) {
  return timeline.rowStarts.length - 1;
}

/** Return the rank of an action. */
export function rankOf(timeline, action) {
  let rank = 0;
  while (timeline.rowStarts[rank + 1] <= action) rank += 1;
  return rank;
}

/** Return the name of an action, such as 2F0. */
export function nameOf(timeline, action) {
  const microbatch = timeline.microbatches[action];
  const kind = timeline.kinds[timeline.kindOf[action]];
  return `${timeline.stages[action]}${kind}${microbatch === NOTHING ? "" : microbatch}`;
}

/** Return the first action of a rank that ends after a time; one past the last if none does. */
export function firstAfter(timeline, rank, time) {
  let low = timeline.rowStarts[rank];
  let high = timeline.rowStarts[rank + 1];
  while (low < high) {
    const middle = (low + high) >> 1;
    if (timeline.ends[middle] > time) high = middle;
    else low = middle + 1;
  }
  return low;
}

/** Return the action that a rank runs at a time, or `NOTHING`. */
export function actionAt(timeline, rank, time) {
  const action = firstAfter(timeline, rank, time);
  const exists = action < timeline.rowStarts[rank + 1];
  return exists && timeline.starts[action] <= time ? action : NOTHING;
}

/** Return the action before another one on its rank, or `NOTHING`. */
export function previousOf(timeline, action) {
  return timeline.rowStarts.includes(action) ? NOTHING : action - 1;
}

/**
 * Return the chain of actions that determines when an action starts, from it back to the first.
 *
 * An action starts when the previous one on its rank ends, or else when what it needs arrives.
 */
export function pathTo(timeline, action) {
  if (timeline.neverRun[action]) return [action]; // it waits in a circle
  const path = [];
  for (let at = action; at !== NOTHING;) {
    path.push(at);
    const previous = previousOf(timeline, at);
    const waited = previous === NOTHING || timeline.starts[at] > timeline.ends[previous];
    at = waited && timeline.waitsFor[at] !== NOTHING ? timeline.waitsFor[at] : previous;
  }
  return path;
}

/** Return the action that ends last: the chain to it is the critical path. */
export function lastAction(timeline) {
  let last = NOTHING;
  for (let rank = 0; rank < numRanks(timeline); rank += 1) {
    const action = timeline.rowStarts[rank + 1] - 1;
    const exists = action >= timeline.rowStarts[rank];
    if (exists && (last === NOTHING || timeline.ends[action] > timeline.ends[last])) last = action;
  }
  return last;
}

/** Return the actions that need the result of an action. */
export function dependentsOf(timeline, action) {
  const found = [];
  for (let at = timeline.waitsFor.indexOf(action); at !== -1;) {
    found.push(at);
    at = timeline.waitsFor.indexOf(action, at + 1);
  }
  return found;
}
