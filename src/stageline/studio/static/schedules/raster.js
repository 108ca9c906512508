// The lanes of a picture as pixels. An action narrower than a pixel adds its share to the colour of
// that pixel, so that a picture of 50,000 actions takes as long as one of 500: it is one loop over
// the visible actions, and one row of pixels for each lane, which is then copied to its full height.

import { rgb } from "./colours.js";
import { firstAfter } from "./timeline.js";

const GAP = 0.06; // of an action's width, between it and the next one ...
const WIDEST_GAP = 0.8; // ... at most, in CSS pixels
const NEVER_RUN = 0.35; // the strength of the colour of actions behind a deadlock
const OPAQUE = 0xff000000;

/**
 * Return the pixels of all lanes with their memory, from the end of the gutter to the right.
 *
 * They are put into `before`, an earlier result, if it has the same size: to allocate and collect
 * 15 MB in every frame, as a screen of double resolution needs, costs frames.
 * `colours` has the page's colours as [red, green, blue], `mostHeld` the memory of a full height.
 */
export function rasterOf(timeline, layout, ratio, colours, mostHeld, before = null) {
  const width = Math.max(1, Math.round(layout.lanesWidth * ratio));
  const height = Math.max(1, Math.round(layout.ranks * layout.pitch * ratio));
  const isReused = before && before.width === width && before.height === height;
  const image = isReused ? before : new ImageData(width, height);
  const pixels = new Uint32Array(image.data.buffer);
  pixels.fill(packed(colours.page));
  const sums = new Float32Array(4 * width); // red, green, blue and the covered share
  const levels = new Float32Array(width);
  const paints = paintsOf(timeline);
  for (let rank = 0; rank < layout.ranks; rank += 1) {
    const top = Math.round(rank * layout.pitch * ratio) * width;
    const laneHeight = Math.round(layout.lane * ratio);
    addLane(timeline, layout, ratio, rank, paints, sums, levels, width);
    putLane(pixels.subarray(top, top + laneHeight * width), sums, width, colours.lane);
    const below = top + (laneHeight + Math.max(1, Math.round(ratio))) * width;
    const memoryHeight = Math.round(layout.memory * ratio);
    const limit = timeline.limits ? timeline.limits[rank] / mostHeld : Infinity;
    const strip = pixels.subarray(below, below + memoryHeight * width);
    putMemory(strip, levels, width, memoryHeight, mostHeld, limit, colours);
  }
  return image;
}

/** Return the colour of each action's stage and kind, as [red, green, blue]. */
function paintsOf(timeline) {
  return timeline.colours.map((row) => timeline.chunks.map((chunk) => rgb(row[chunk][0])));
}

function addLane(timeline, layout, ratio, rank, paints, sums, levels, width) {
  const { starts, ends, during, after, kindOf, stages, neverRun } = timeline;
  const scale = layout.scale * ratio;
  const { from } = layout;
  const last = timeline.rowStarts[rank + 1];
  const visibleEnd = from + width / scale;
  sums.fill(0);
  levels.fill(0);
  let at = firstAfter(timeline, rank, from);
  const before = at > timeline.rowStarts[rank] ? after[at - 1] : timeline.heldAtStart[rank];
  if (at === last) raise(levels, 0, width, before);
  else raise(levels, 0, (starts[at] - from) * scale, before);
  for (; at < last && starts[at] < visibleEnd; at += 1) {
    const x0 = (starts[at] - from) * scale;
    const x1 = (ends[at] - from) * scale;
    const gap = Math.min(WIDEST_GAP * ratio, GAP * (x1 - x0));
    const strength = neverRun[at] ? NEVER_RUN : 1;
    cover(sums, x0, x1 - gap, paints[kindOf[at]][stages[at]], strength, width);
    raise(levels, x0, x1, during[at]);
    raise(levels, x1, at + 1 < last ? (starts[at + 1] - from) * scale : width, after[at]);
  }
}

/** Add a colour to the pixels between two positions, to the first and last by their share. */
function cover(sums, x0, x1, colour, strength, width) {
  const left = Math.max(0, x0);
  const right = Math.min(width, x1);
  for (let x = Math.floor(left); x < right; x += 1) {
    const share = strength * (Math.min(right, x + 1) - Math.max(left, x));
    const i = 4 * x;
    sums[i] += share * colour[0];
    sums[i + 1] += share * colour[1];
    sums[i + 2] += share * colour[2];
    sums[i + 3] += share;
  }
}

/** Raise the levels between two positions to at least a value. */
function raise(levels, x0, x1, value) {
  const right = Math.min(levels.length, Math.ceil(x1));
  for (let x = Math.max(0, Math.floor(x0)); x < right; x += 1) {
    if (levels[x] < value) levels[x] = value;
  }
}

function putLane(pixels, sums, width, background) {
  for (let x = 0, i = 0; x < width; x += 1, i += 4) {
    const rest = Math.max(0, 1 - sums[i + 3]);
    pixels[x] = packed([
      sums[i] + rest * background[0],
      sums[i + 1] + rest * background[1],
      sums[i + 2] + rest * background[2],
    ]);
  }
  for (let y = width; y < pixels.length; y += width) pixels.copyWithin(y, 0, width);
}

function putMemory(pixels, levels, width, height, mostHeld, limit, colours) {
  const held = packed(colours.memory);
  const over = packed(colours.over);
  for (let y = 0; y < height; y += 1) {
    const share = (height - y - 0.5) / height;
    const colour = share > limit ? over : held;
    const least = share * mostHeld;
    for (let x = 0; x < width; x += 1) if (levels[x] > least) pixels[y * width + x] = colour;
  }
  const line = Math.round(height * (1 - limit));
  if (line >= 0 && line < height) pixels.fill(over, line * width, (line + 1) * width);
}

/** Return a colour as ImageData stores it, on a little-endian machine. */
function packed([red, green, blue]) {
  return (OPAQUE | (blue << 16) | (green << 8) | red) >>> 0;
}
