// The mouse and the finger on a picture: hover, click, drag to pan, drag an action to move it.

import { cellOf } from "./board.js";
import { rankAt, timeAt } from "./layout.js";
import { NOTHING, actionAt } from "./timeline.js";

const STILL = 4; // pixels that a click may move
const WHEEL_ZOOM = 0.002;

/** Let the pointer act on a figure; `act` has `isEditing`, `tell` for the tip, and `move`. */
export function followPointer(board, figure, act) {
  const { marks } = figure.picture;
  let drag = null; // { x, time, action, isMoving }

  marks.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    const at = placeOf(figure, event);
    drag = { x: event.clientX, from: board.times.from, ...at, isMoving: false };
    marks.setPointerCapture(event.pointerId);
  });
  marks.addEventListener("pointermove", (event) => {
    if (!drag) {
      const { rank, action, time } = placeOf(figure, event);
      board.hover(rank === NOTHING ? null : figure, action);
      act.tell(rank === NOTHING ? null : { figure, rank, action, time }, event);
      return;
    }
    drag.isMoving ||= Math.abs(event.clientX - drag.x) > STILL;
    if (!drag.isMoving) return;
    act.tell(null, event);
    if (act.isEditing() && drag.action !== NOTHING && !figure.timeline.isStream) {
      board.moved = { figure, action: drag.action, ...targetOf(figure, drag, event) };
      board.draw();
    } else {
      const by = (drag.x - event.clientX) / figure.picture.layout.scale;
      board.pan(drag.from + by - board.times.from);
    }
  });
  marks.addEventListener("pointerup", () => {
    if (drag && !drag.isMoving) board.select(figure, drag.action, true);
    if (board.moved) act.move(figure, drag.action, board.moved.position);
    drag = board.moved = null;
    board.draw();
  });
  marks.addEventListener("pointercancel", () => {
    drag = board.moved = null;
    board.draw();
  });
  marks.addEventListener("pointerleave", (event) => {
    board.hover(null, NOTHING);
    act.tell(null, event);
  });
  marks.addEventListener("wheel", (event) => {
    const { layout } = figure.picture;
    if (event.ctrlKey || event.metaKey) {
      event.preventDefault(); // of the page's own zoom
      const factor = Math.exp(event.deltaY * WHEEL_ZOOM * (event.ctrlKey ? 3 : 1));
      board.zoom(factor, timeAt(layout, event.offsetX));
    } else if (board.state.view && (event.shiftKey || event.deltaX)) {
      event.preventDefault();
      board.pan((event.deltaX || event.deltaY) / layout.scale);
    }
  }, { passive: false });
}

function placeOf(figure, { offsetX, offsetY }) {
  const { layout } = figure.picture;
  const rank = offsetX < layout.gutter ? NOTHING : rankAt(layout, offsetY);
  const time = timeAt(layout, offsetX);
  return { rank, time, action: rank === NOTHING ? NOTHING : actionAt(figure.timeline, rank, time) };
}

/** Return where a dragged action would go: its time, its position in the row, and the place of it. */
function targetOf({ timeline, picture }, { action, x }, { clientX }) {
  const by = (clientX - x) / picture.layout.scale;
  const { rank } = cellOf(timeline, action);
  const edge = by > 0 ? timeline.ends[action] + by : timeline.starts[action] + by;
  let position = 0;
  let boundary = timeline.starts[timeline.rowStarts[rank]];
  for (let at = timeline.rowStarts[rank]; at < timeline.rowStarts[rank + 1]; at += 1) {
    if (at === action) continue;
    if ((timeline.starts[at] + timeline.ends[at]) / 2 > edge) break;
    position += 1;
    boundary = timeline.ends[at];
  }
  return { time: timeline.starts[action] + by, position, boundary };
}
