// The keyboard on a picture: everything that the pointer can do.

import { cellOf } from "./board.js";
import { NOTHING, firstAfter, numRanks } from "./timeline.js";

const ZOOM = 1.5;
const PAN = 0.2; // of the visible times

/** Let the keyboard act on a figure; `act` has `move` and `undo`. */
export function followKeys(board, figure, act) {
  figure.picture.marks.addEventListener("keydown", (event) => {
    const command = commandOf(event);
    const run = COMMANDS[command];
    if (!run) return;
    event.preventDefault();
    run(board, figure, act);
  });
}

function commandOf({ key, altKey, shiftKey, ctrlKey, metaKey }) {
  if (ctrlKey || metaKey) return key.toLowerCase() === "z" ? "undo" : "";
  if (altKey) return `alt ${key}`;
  if (shiftKey && key.startsWith("Arrow")) return `shift ${key}`;
  return key;
}

const COMMANDS = {
  ArrowRight: (board, figure) => selectBy(board, figure, 1),
  ArrowLeft: (board, figure) => selectBy(board, figure, -1),
  ArrowDown: (board, figure) => selectOnRank(board, figure, 1),
  ArrowUp: (board, figure) => selectOnRank(board, figure, -1),
  Home: (board, figure) => selectEnd(board, figure, 0),
  End: (board, figure) => selectEnd(board, figure, 1),
  Enter: (board, figure) => {
    if (board.selected) board.select(figure, board.selected.action, !board.showsDependencies);
  },
  Escape: (board, figure) => board.select(figure, NOTHING),
  "+": (board) => board.zoom(1 / ZOOM, middleOf(board)),
  "=": (board) => board.zoom(1 / ZOOM, middleOf(board)),
  "-": (board) => board.zoom(ZOOM, middleOf(board)),
  "0": (board) => board.fit(),
  "shift ArrowRight": (board) => board.pan(PAN * (board.times.to - board.times.from)),
  "shift ArrowLeft": (board) => board.pan(-PAN * (board.times.to - board.times.from)),
  "alt ArrowRight": (board, figure, act) => moveBy(board, figure, act, 1),
  "alt ArrowLeft": (board, figure, act) => moveBy(board, figure, act, -1),
  undo: (board, figure, act) => act.undo(figure),
};

function selectedIn(board, figure) {
  return board.selected?.figure === figure ? board.selected.action : NOTHING;
}

function selectBy(board, figure, step) {
  const action = selectedIn(board, figure);
  if (action === NOTHING) return board.select(figure, 0);
  const { rank } = cellOf(figure.timeline, action);
  const { rowStarts } = figure.timeline;
  const next = Math.min(Math.max(rowStarts[rank], action + step), rowStarts[rank + 1] - 1);
  return board.select(figure, next);
}

function selectOnRank(board, figure, step) {
  const action = selectedIn(board, figure);
  if (action === NOTHING) return board.select(figure, 0);
  const { timeline } = figure;
  const rank = cellOf(timeline, action).rank + step;
  if (rank < 0 || rank >= numRanks(timeline)) return undefined;
  const middle = (timeline.starts[action] + timeline.ends[action]) / 2;
  const found = Math.min(firstAfter(timeline, rank, middle), timeline.rowStarts[rank + 1] - 1);
  return board.select(figure, found);
}

function selectEnd(board, figure, which) {
  const action = selectedIn(board, figure);
  const { rank } = cellOf(figure.timeline, action === NOTHING ? 0 : action);
  board.select(figure, figure.timeline.rowStarts[rank + which] - which);
}

function moveBy(board, figure, act, step) {
  const action = selectedIn(board, figure);
  if (action === NOTHING || figure.timeline.isStream) return;
  const { rank, position } = cellOf(figure.timeline, action);
  const { rowStarts } = figure.timeline;
  const target = position + step;
  if (target < 0 || target >= rowStarts[rank + 1] - rowStarts[rank]) return;
  act.move(figure, action, target);
}

/** Return the middle of the selected action, around which keys zoom, or that of the picture. */
function middleOf(board) {
  if (!board.selected) return undefined;
  const { figure, action } = board.selected;
  return (figure.timeline.starts[action] + figure.timeline.ends[action]) / 2;
}
