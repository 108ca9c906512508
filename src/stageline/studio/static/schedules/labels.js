// The text of a picture: the axis, the numbers of the ranks, and the names of actions if they fit.

import { laneTop, xOf } from "./layout.js";
import { shortNumber } from "../shared/numbers.js";
import { ticks } from "./scale.js";
import { NOTHING, firstAfter } from "./timeline.js";

const FONT = '"Helvetica Neue", Helvetica, Arial, sans-serif';
const DIGIT = 0.58; // the width of a digit, in font sizes
const LEAST_FONT = 7;
const TICK_WIDTH = 70;
const MARGIN = 2;

/** Draw the axis above the lanes and the numbers of the ranks beside them. */
export function drawAxis(context, layout, colours) {
  const to = layout.from + layout.lanesWidth / layout.scale;
  context.font = `11px ${FONT}`;
  context.textBaseline = "middle";
  context.fillStyle = colours.quiet;
  context.textAlign = "center";
  for (const time of ticks(layout.from, to, Math.max(2, layout.lanesWidth / TICK_WIDTH))) {
    const x = xOf(layout, time);
    context.fillRect(x, layout.axis - 5, 1, 4);
    if (x < layout.width - 4 * MARGIN) context.fillText(shortNumber(time), x, layout.axis - 13);
  }
  context.textAlign = "right";
  const every = Math.max(1, Math.ceil(13 / layout.pitch));
  for (let rank = 0; rank < layout.ranks; rank += every) {
    context.fillText(rank, layout.gutter - 8, laneTop(layout, rank) + layout.lane / 2);
  }
}

/** Draw the names of actions that are wide enough, such as F3. */
export function drawNames(context, timeline, layout, colours) {
  const size = Math.min(12, 0.75 * layout.lane);
  if (size < LEAST_FONT) return;
  context.font = `${size}px ${FONT}`;
  context.textAlign = "center";
  context.textBaseline = "middle";
  const to = layout.from + layout.lanesWidth / layout.scale;
  for (let rank = 0; rank < layout.ranks; rank += 1) {
    const y = laneTop(layout, rank) + layout.lane / 2 + 0.5;
    const last = timeline.rowStarts[rank + 1];
    let at = firstAfter(timeline, rank, layout.from);
    for (; at < last && timeline.starts[at] < to; at += 1) {
      const left = Math.max(layout.gutter, xOf(layout, timeline.starts[at]));
      const right = Math.min(layout.width, xOf(layout, timeline.ends[at]));
      const text = fitting(timeline, at, (right - left - MARGIN) / (DIGIT * size));
      if (!text) continue;
      const chunk = timeline.chunks[timeline.stages[at]];
      context.fillStyle = timeline.neverRun[at]
        ? colours.text
        : timeline.colours[timeline.kindOf[at]][chunk][1];
      context.fillText(text, (left + right) / 2, y);
    }
  }
}

/** Return the longest name of an action with at most so many characters: F3, 3, F or none. */
function fitting(timeline, action, characters) {
  if (characters < 1) return "";
  const kind = timeline.kinds[timeline.kindOf[action]][0];
  const microbatch = timeline.microbatches[action];
  if (microbatch === NOTHING) return kind;
  const number = String(microbatch);
  if (characters >= number.length + 1.2) return kind + number;
  return characters >= number.length ? number : "";
}
