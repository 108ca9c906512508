// Many elements as one stop of the Tab key: arrow keys, Home and End move between them.

const STEPS = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 };

/** Make these elements one stop; `current` is the index of the one that Tab reaches. */
export function roving(elements, current = 0) {
  elements.forEach((element, index) => {
    element.setAttribute("tabindex", index === current ? 0 : -1);
    element.addEventListener("keydown", (event) => {
      const next = target(event.key, index, elements.length);
      if (next === undefined) return;
      event.preventDefault();
      elements[next].focus();
    });
    element.addEventListener("focus", () => {
      for (const each of elements) each.setAttribute("tabindex", each === element ? 0 : -1);
    });
  });
}

function target(key, index, count) {
  if (key === "Home") return 0;
  if (key === "End") return count - 1;
  if (!(key in STEPS)) return undefined;
  return Math.min(count - 1, Math.max(0, index + STEPS[key]));
}
