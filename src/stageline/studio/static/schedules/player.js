// Stepping through time: a slider, steps from event to event, and a button that plays.

import { byId } from "../shared/elements.js";
import { shortNumber } from "../shared/numbers.js";
import { describeTime } from "./words.js";

const SECONDS = 12; // for everything that is visible

/** Let the controls set the time of the board; return a function that shows it in them. */
export function timeControls(board, onChange) {
  const [slider, play, text, running] = ["time", "play", "time-text", "running"].map(byId);
  const set = (time) => {
    board.state.time = Math.min(Math.max(0, time), board.end);
    board.draw();
    show();
    onChange();
  };
  const show = () => {
    const { time } = board.state;
    slider.max = board.end;
    slider.value = time ?? 0;
    text.textContent = time === null ? "" : shortNumber(time);
    running.textContent = time === null ? "" : board.figures
      .map(({ title, timeline }) => `${title} at ${shortNumber(time)}: ${describeTime(timeline, time)}`)
      .join("\n");
  };
  slider.addEventListener("input", () => set(Number(slider.value)));
  byId("step-on").addEventListener("click", () => set(eventAfter(board, board.state.time ?? 0)));
  byId("step-back").addEventListener("click", () => set(eventBefore(board, board.state.time ?? 0)));
  play.addEventListener("click", () => {
    const isPlaying = play.getAttribute("aria-pressed") !== "true";
    play.setAttribute("aria-pressed", String(isPlaying));
    if (isPlaying) run(board, play, set);
  });
  return show;
}

function run(board, play, set) {
  if ((board.state.time ?? 0) >= board.end) set(0);
  let before = performance.now();
  const step = (now) => {
    if (play.getAttribute("aria-pressed") !== "true") return;
    const { from, to } = board.times;
    set((board.state.time ?? 0) + ((now - before) / 1000 / SECONDS) * (to - from));
    before = now;
    if (board.state.time < board.end) requestAnimationFrame(step);
    else play.setAttribute("aria-pressed", "false");
  };
  requestAnimationFrame(step);
}

function eventAfter(board, time) {
  let next = board.end;
  for (const each of events(board)) if (each > time && each < next) next = each;
  return next;
}

function eventBefore(board, time) {
  let previous = 0;
  for (const each of events(board)) if (each < time && each > previous) previous = each;
  return previous;
}

function* events(board) {
  for (const { timeline } of board.figures) {
    yield* timeline.starts;
    yield* timeline.ends;
  }
}
