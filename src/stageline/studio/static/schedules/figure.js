// A schedule on the page: its heading, its buttons, the checker's verdict and its picture.

import { element, setText } from "../shared/elements.js";
import { percent, shortNumber, signedPercent } from "../shared/numbers.js";
import { Picture } from "./picture.js";
import { saveButtons } from "./save.js";

/** Return the figure of a schedule; `act` has `undo`, `reset`, `requestOf` and `onError`. */
export function makeFigure(name, act) {
  const { buttons, line } = saveButtons(() => act.requestOf(name), act.onError);
  const figure = {
    name,
    title: name,
    picture: new Picture(name, "keys"),
    timeline: null,
    makespanBefore: null, // of the order before its last edit
    isDue: true,
    heading: element("h2", {}, name),
    phrases: element("span", { className: "quiet" }),
    verdict: element("p", { className: "verdict" }),
    undo: element("button", { type: "button", hidden: true }, "Undo"),
    reset: element("button", { type: "button", hidden: true }, "Reset"),
  };
  figure.verdict.setAttribute("role", "status");
  figure.undo.addEventListener("click", () => act.undo(figure));
  figure.reset.addEventListener("click", () => act.reset(figure));
  figure.bar = element("div", { className: "row" }, figure.undo, figure.reset, ...buttons);
  figure.section = element(
    "section", { className: "figure", data: { name }, aria: { label: name } },
    element("div", { className: "head" }, figure.heading, figure.phrases, figure.bar),
    figure.verdict, figure.picture.frame, line,
  );
  return figure;
}

/** Show a timeline, or why there is none, in a figure; `numMoves` is the number of edits. */
export function updateFigure(figure, timeline, numMoves) {
  const { error, verdict, makespan } = timeline;
  figure.timeline = timeline;
  figure.title = numMoves ? `${figure.name} edited` : figure.name;
  figure.heading.textContent = figure.title;
  figure.phrases.textContent = error ? "" : phrasesOf(timeline);
  figure.picture.frame.hidden = Boolean(error);
  figure.undo.hidden = figure.reset.hidden = !numMoves;
  figure.verdict.classList.toggle("error", Boolean(error || verdict));
  setText(figure.verdict, error || verdict || (numMoves ? legalEdit(figure, makespan) : ""));
  if (!numMoves) figure.makespanBefore = makespan ?? null;
}

function legalEdit({ makespanBefore }, makespan) {
  const change = makespanBefore ? makespan / makespanBefore - 1 : 0;
  const compared = makespanBefore
    ? ` was ${shortNumber(makespanBefore)}, is ${shortNumber(makespan)} ` +
      `(${signedPercent(change)})`
    : ` is ${shortNumber(makespan)}`;
  return `The checker finds nothing wrong with this order. The makespan${compared}.`;
}

function phrasesOf({ makespan, lowerBound, stepBubble, verdict }) {
  if (verdict) return "does not complete";
  const isLeast = makespan <= lowerBound * (1 + 1e-9);
  const bound = isLeast ? "optimal for this memory" : `lower bound ${shortNumber(lowerBound)}`;
  return `makespan ${shortNumber(makespan)} (${bound}), bubble ${percent(stepBubble)}`;
}
