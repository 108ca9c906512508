// The curves of runs as points: along steps or time, smoothed, and where a pointer is.

import { extentOf } from "../shared/scales.js";

/** Return a curve as [x, value] pairs; what was not a number is null. */
export function pointsOf(curves, name, along) {
  const begin = curves.time.find((time) => time !== null) ?? 0;
  return curves.step.map((step, index) => [
    along === "step" ? step : (curves.time[index] ?? begin) - begin,
    curves[name][index],
  ]);
}

/** Return the points with an exponential moving mean of their values; 0 leaves them. */
export function smoothed(points, weight) {
  let sum = 0, total = 0;
  return points.map(([x, value]) => {
    if (value === null) return [x, null];
    sum = weight * sum + (1 - weight) * value;
    total = weight * total + (1 - weight); // less than 1 at the beginning
    return [x, sum / total];
  });
}

/** Return the point nearest to an x, or null if there is none. */
export function nearest(points, x) {
  let best = null;
  for (const point of points) {
    if (point[1] !== null && (best === null || Math.abs(point[0] - x) < Math.abs(best[0] - x))) best = point;
  }
  return best;
}

/** Return the smallest and the largest x of all series. */
export function rangeOf(series) {
  return extentOf(series.flatMap(({ points }) => points.map(([x]) => x))) ?? [0, 1];
}
