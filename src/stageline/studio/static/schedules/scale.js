// Times and pixels: all pictures share one axis.

const MOST_ZOOM = 1e5;
const TICK_STEPS = [1, 2, 5, 10];

/** Return the visible times: those of the view, or everything. */
export function visibleTimes(view, end) {
  if (view && view.from < end) return view;
  return { from: 0, to: end > 0 ? end : 1 };
}

/** Return a view that shows `factor` times as much around a time; null if that is everything. */
export function zoomed(view, end, factor, time) {
  const { from, to } = visibleTimes(view, end);
  const length = Math.max((to - from) * factor, end / MOST_ZOOM);
  if (length >= end) return null;
  const share = (time - from) / (to - from);
  return within(time - share * length, length, end);
}

/** Return a view moved by a time, as far as there is something to see. */
export function panned(view, end, by) {
  if (!view) return null;
  return within(view.from + by, view.to - view.from, end);
}

/** Return a view of the same length in which a time is visible. */
export function showing(view, end, start, stop) {
  if (!view || (start >= view.from && stop <= view.to)) return view;
  const length = view.to - view.from;
  return within((start + stop - length) / 2, length, end);
}

/** Return about `count` round times in a range. */
export function ticks(from, to, count) {
  const power = 10 ** Math.floor(Math.log10((to - from) / count));
  const step = power * TICK_STEPS.find((each) => power * each * count >= (to - from) * (1 - 1e-9));
  const found = [];
  for (let i = Math.ceil(from / step - 1e-9); i * step <= to * (1 + 1e-12); i += 1) {
    found.push(i * step);
  }
  return found;
}

function within(from, length, end) {
  const first = Math.min(Math.max(0, from), end - length);
  return { from: first, to: first + length };
}
