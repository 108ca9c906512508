// Sizes and positions in a picture, in CSS pixels: an axis, then a lane and its memory for each rank.

import { numRanks } from "./timeline.js";

const GUTTER = 34; // left of the lanes, for the numbers of the ranks
const RIGHT = 10;
const AXIS = 24;
const LANES_HEIGHT = 560; // shared by the ranks, within the limits of the pitch
const MIN_PITCH = 20;
const MAX_PITCH = 56;

/** Return the sizes of a picture of this width. */
export function layoutOf(timeline, width, times) {
  const ranks = numRanks(timeline);
  const pitch = Math.round(Math.min(Math.max(MIN_PITCH, LANES_HEIGHT / ranks), MAX_PITCH));
  const lane = Math.round(0.54 * pitch);
  const memory = Math.round(0.3 * pitch);
  const lanesWidth = Math.max(1, width - GUTTER - RIGHT);
  return {
    ranks, pitch, lane, memory, width, lanesWidth,
    gutter: GUTTER,
    axis: AXIS,
    height: AXIS + ranks * pitch,
    from: times.from,
    scale: lanesWidth / (times.to - times.from),
  };
}

/** Return the horizontal position of a time. */
export function xOf(layout, time) {
  return layout.gutter + (time - layout.from) * layout.scale;
}

/** Return the time at a horizontal position. */
export function timeAt(layout, x) {
  return layout.from + (x - layout.gutter) / layout.scale;
}

/** Return the top of a rank's lane; its memory is below it. */
export function laneTop(layout, rank) {
  return layout.axis + rank * layout.pitch;
}

/** Return the rank at a vertical position, or -1. */
export function rankAt(layout, y) {
  const rank = Math.floor((y - layout.axis) / layout.pitch);
  return rank >= 0 && rank < layout.ranks ? rank : -1;
}
