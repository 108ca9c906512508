// What is drawn above a picture: paths, dependencies, the selected action, the time, a moved action.

import { laneTop, xOf } from "./layout.js";
import { NOTHING, actionAt, dependentsOf, pathTo, rankOf } from "./timeline.js";

const LEAST_OUTLINED = 6; // pixels

/** Draw the marks of a picture; each of `marks` may be null, or `NOTHING` for an action. */
export function drawMarks(context, timeline, layout, colours, marks) {
  context.save();
  context.beginPath();
  context.rect(layout.gutter, 0, layout.width - layout.gutter, layout.height);
  context.clip();
  if (timeline.lowerBound) drawBound(context, layout, colours, timeline.lowerBound);
  if (marks.time !== null) drawTime(context, timeline, layout, colours, marks.time);
  if (marks.pathTo !== NOTHING) drawPath(context, timeline, layout, colours, marks.pathTo);
  if (marks.selected !== NOTHING) {
    if (marks.showsDependencies) {
      drawDependencies(context, timeline, layout, colours, marks.selected);
    }
    outline(context, timeline, layout, marks.selected, colours.text, 2.5);
  }
  if (marks.moved) drawMoved(context, timeline, layout, colours, marks.moved);
  context.restore();
}

/** Draw a dashed line at the lower bound of the makespan. */
function drawBound(context, layout, colours, bound) {
  context.strokeStyle = colours.text;
  context.lineWidth = 1;
  context.setLineDash([4, 3]);
  context.beginPath();
  context.moveTo(xOf(layout, bound), layout.axis - 6);
  context.lineTo(xOf(layout, bound), layout.height);
  context.stroke();
  context.setLineDash([]);
}

/** Draw a line at a time, and outline what runs then. */
function drawTime(context, timeline, layout, colours, time) {
  for (let rank = 0; rank < layout.ranks; rank += 1) {
    const action = actionAt(timeline, rank, time);
    if (action !== NOTHING) outline(context, timeline, layout, action, colours.accent, 2.5);
  }
  context.fillStyle = colours.accent;
  context.fillRect(xOf(layout, time) - 0.75, layout.axis - 8, 1.5, layout.height);
}

/** Outline the actions of a path; those that are too narrow for it get a line above them. */
function drawPath(context, timeline, layout, colours, action) {
  context.fillStyle = colours.text;
  for (const at of pathTo(timeline, action)) {
    const width = (timeline.ends[at] - timeline.starts[at]) * layout.scale;
    if (width < LEAST_OUTLINED) {
      const top = laneTop(layout, rankOf(timeline, at)) - 2;
      context.fillRect(xOf(layout, timeline.starts[at]), top, Math.max(1, width), 3);
    } else {
      outline(context, timeline, layout, at, colours.text, 1.5);
    }
  }
}

function drawDependencies(context, timeline, layout, colours, action) {
  context.strokeStyle = colours.text;
  context.fillStyle = colours.text;
  context.lineWidth = 1.5;
  const needed = timeline.waitsFor[action];
  if (needed !== NOTHING) arrow(context, timeline, layout, needed, action);
  for (const dependent of dependentsOf(timeline, action)) {
    arrow(context, timeline, layout, action, dependent);
  }
}

function arrow(context, timeline, layout, writer, reader) {
  const [x0, y0] = [xOf(layout, timeline.ends[writer]), middleOf(timeline, layout, writer)];
  const [x1, y1] = [xOf(layout, timeline.starts[reader]), middleOf(timeline, layout, reader)];
  context.beginPath();
  context.moveTo(x0, y0);
  context.lineTo(x1, y1);
  context.stroke();
  context.beginPath();
  context.arc(x1, y1, 3.5, 0, 2 * Math.PI);
  context.fill();
  outline(context, timeline, layout, writer, context.strokeStyle, 1.5);
  outline(context, timeline, layout, reader, context.strokeStyle, 1.5);
}

/** Draw an action at the pointer, and a line where it would go. */
function drawMoved(context, timeline, layout, colours, { action, time, boundary }) {
  const rank = rankOf(timeline, action);
  const width = (timeline.ends[action] - timeline.starts[action]) * layout.scale;
  context.globalAlpha = 0.6;
  context.fillStyle = colours.accent;
  context.fillRect(xOf(layout, time), laneTop(layout, rank) - 3, width, layout.lane);
  context.globalAlpha = 1;
  context.fillRect(xOf(layout, boundary) - 1.5, laneTop(layout, rank) - 4, 3, layout.lane + 8);
}

function outline(context, timeline, layout, action, colour, width) {
  const left = xOf(layout, timeline.starts[action]);
  const right = xOf(layout, timeline.ends[action]);
  context.strokeStyle = colour;
  context.lineWidth = width;
  const top = laneTop(layout, rankOf(timeline, action));
  context.strokeRect(left, top, Math.max(1, right - left), layout.lane);
}

function middleOf(timeline, layout, action) {
  return laneTop(layout, rankOf(timeline, action)) + layout.lane / 2;
}
