// All pictures above each other on one axis, with what is selected, hovered and moved in them.

import { byId } from "../shared/elements.js";
import { themeColours } from "./colours.js";
import { panned, showing, visibleTimes, zoomed } from "./scale.js";
import { NOTHING, lastAction, rankOf } from "./timeline.js";

/**
 * The pictures and their marks. Drawing is put off to the next frame, and left out for pictures
 * that are not on the screen. State: the selection, the hovered action, the moved one, what is due.
 */
export class Board {
  constructor(state) {
    this.state = state; // view and time are those of the page
    this.figures = []; // { picture, timeline }
    this.selected = null; // { figure, action, numActions }
    this.hovered = null;
    this.moved = null;
    this.showsDependencies = false;
    this.colours = themeColours();
    this.isFrameAsked = false;
    this.drawn = 0; // the number of frames
    addEventListener("scroll", () => this.draw(), { passive: true });
    new ResizeObserver(() => this.redraw()).observe(byId("figures"));
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
      this.colours = themeColours();
      this.redraw();
    });
  }

  /** Show these figures; the selection is kept if its figure still has as many actions. */
  show(figures) {
    const kept = this.selected && figures.find(({ name }) => name === this.selected.figure.name);
    const isSame = kept && kept.timeline.starts.length === this.selected.numActions;
    this.selected = isSame ? { ...this.selected, figure: kept } : null;
    this.hovered = null;
    this.moved = null;
    this.figures = figures;
    this.redraw();
  }

  /** Return the end of the longest timeline. */
  get end() {
    return Math.max(0, ...this.figures.map(({ timeline }) => timeline.end));
  }

  /** Return the times that are visible. */
  get times() {
    return visibleTimes(this.state.view, this.end);
  }

  zoom(factor, time = (this.times.from + this.times.to) / 2) {
    this.state.view = zoomed(this.state.view, this.end, factor, time);
    this.redraw();
  }

  pan(by) {
    this.state.view = panned(this.state.view, this.end, by);
    this.redraw();
  }

  fit() {
    this.state.view = null;
    this.redraw();
  }

  /** Select an action of a figure, and move it into view. */
  select(figure, action, showsDependencies = this.showsDependencies) {
    const numActions = figure.timeline.starts.length;
    this.selected = action === NOTHING ? null : { figure, action, numActions };
    this.showsDependencies = showsDependencies && action !== NOTHING;
    if (action !== NOTHING) {
      const { starts, ends } = figure.timeline;
      const view = showing(this.state.view, this.end, starts[action], ends[action]);
      if (view !== this.state.view) {
        this.state.view = view;
        this.redraw();
      }
    }
    this.draw();
  }

  /** Mark the path to an action, or the critical path where a rank waits. */
  hover(figure, action) {
    this.hovered = figure && { figure, action: action === NOTHING ? lastAction(figure.timeline) : action };
    this.draw();
  }

  /** Draw everything anew in the next frame. */
  redraw() {
    for (const figure of this.figures) figure.isDue = true;
    this.draw();
  }

  /** Draw what is due, and all marks, in the next frame. */
  draw() {
    if (this.isFrameAsked) return;
    this.isFrameAsked = true;
    requestAnimationFrame(() => {
      this.isFrameAsked = false;
      this.drawNow();
    });
  }

  drawNow() {
    const mostHeld = mostMemory(this.figures);
    for (const figure of this.figures) {
      if (!figure.picture.isVisible() && figure.picture.layout) continue;
      if (figure.isDue) {
        figure.picture.drawLanes(figure.timeline, this.times, mostHeld, this.colours);
        figure.isDue = false;
      }
      figure.picture.drawMarks(this.colours, this.marksOf(figure));
    }
    this.drawn += 1;
    byId("figures").dispatchEvent(new CustomEvent("drawn", { detail: this.drawn }));
  }

  marksOf(figure) {
    const actionIn = (mark) => (mark && mark.figure === figure ? mark.action : NOTHING);
    return {
      time: this.state.time,
      pathTo: actionIn(this.hovered),
      selected: actionIn(this.selected),
      showsDependencies: this.showsDependencies,
      moved: actionIn(this.moved) === NOTHING ? null : this.moved,
    };
  }
}

/** Return the rank and position of an action, as the server counts them. */
export function cellOf(timeline, action) {
  const rank = rankOf(timeline, action);
  return { rank, position: action - timeline.rowStarts[rank] };
}

/** Return the memory that takes the full height of a strip, which is the same for all pictures. */
function mostMemory(figures) {
  const peaks = figures.flatMap(({ timeline }) => [...timeline.peakMemory, ...timeline.limits ?? []]);
  return Math.max(1e-300, ...peaks);
}
