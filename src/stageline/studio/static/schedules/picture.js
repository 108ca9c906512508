// The picture of one timeline: a canvas with its lanes, and a canvas with marks above it.

import { element } from "../shared/elements.js";
import { drawAxis, drawNames } from "./labels.js";
import { layoutOf } from "./layout.js";
import { drawMarks } from "./marks.js";
import { rasterOf } from "./raster.js";
import { numRanks } from "./timeline.js";

/** A picture on the page. State: its timeline, the layout and the pixels of the last drawing. */
export class Picture {
  constructor(title, help) {
    this.lanes = element("canvas", { className: "lanes", aria: { hidden: "true" } });
    this.marks = element("canvas", {
      className: "marks", tabIndex: 0, aria: { describedby: help },
    });
    this.marks.setAttribute("role", "application");
    this.frame = element("div", { className: "picture" }, this.lanes, this.marks);
    this.title = title;
    this.timeline = null;
    this.layout = null;
    this.image = null;
  }

  /** Return whether any of the picture is on the screen. */
  isVisible() {
    const { top, bottom } = this.frame.getBoundingClientRect();
    return bottom > 0 && top < innerHeight;
  }

  /** Draw the lanes for these visible times. */
  drawLanes(timeline, times, mostHeld, colours) {
    this.timeline = timeline;
    const ratio = devicePixelRatio || 1;
    const layout = layoutOf(timeline, this.frame.clientWidth, times);
    this.layout = layout;
    this.frame.style.height = `${layout.height}px`;
    const context = sized(this.lanes, layout, ratio);
    this.image = rasterOf(timeline, layout, ratio, colours.pixels, mostHeld, this.image);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.lanes.width, this.lanes.height);
    const [left, top] = [layout.gutter, layout.axis].map((each) => Math.round(each * ratio));
    context.putImageData(this.image, left, top);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawAxis(context, layout, colours);
    drawNames(context, timeline, layout, colours);
    this.marks.setAttribute("aria-label", this.describe());
  }

  /** Draw what is above the lanes. */
  drawMarks(colours, marks) {
    if (!this.layout) return;
    const ratio = devicePixelRatio || 1;
    const context = sized(this.marks, this.layout, ratio);
    context.setTransform(1, 0, 0, 1, 0, 0);
    context.clearRect(0, 0, this.marks.width, this.marks.height);
    context.setTransform(ratio, 0, 0, ratio, 0, 0);
    drawMarks(context, this.timeline, this.layout, colours, marks);
  }

  /** Return what the picture is, for those who do not see it. */
  describe() {
    return `Timeline of ${this.title}: ${numRanks(this.timeline)} ranks from top to bottom, ` +
      "time from left to right. Arrow keys select an action.";
  }
}

/** Return the context of a canvas, which gets the size of a layout unless it has it. */
function sized(canvas, layout, ratio) {
  const width = Math.round(layout.width * ratio);
  const height = Math.round(layout.height * ratio);
  if (canvas.width !== width || canvas.height !== height) {
    canvas.width = width;
    canvas.height = height;
    canvas.style.width = `${layout.width}px`;
    canvas.style.height = `${layout.height}px`;
  }
  return canvas.getContext("2d");
}
