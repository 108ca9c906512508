// The colours of the actions that are shown.

import { element } from "../shared/elements.js";
import { kindInWords } from "./timeline.js";

/** Fill the list of colours: for each kind as many as the ranks have stages. */
export function fillLegend(list, timelines) {
  const good = timelines.filter(({ error }) => !error);
  const [first] = good.toSorted((a, b) => b.colours[0].length - a.colours[0].length);
  const items = (first?.kinds ?? []).flatMap((kind, code) => {
    if (!good.some(({ kindOf }) => kindOf.includes(code))) return [];
    const swatches = first.colours[code].map(([colour, ink]) => swatch(colour, ink, kind[0]));
    return [element("li", {}, ...swatches, ` ${kindInWords(kind)}`)];
  });
  if (good.some(({ verdict }) => verdict)) items.push(element("li", {}, "pale: never runs"));
  items.push(element("li", {}, sample("memory"), " memory of the rank"));
  if (good.some(({ limits }) => limits)) {
    items.push(element("li", {}, sample("over"), " above the limit"));
  }
  if (good.some(({ lowerBound }) => lowerBound)) {
    items.push(element("li", {}, sample("bound"), " lower bound of the makespan"));
  }
  list.replaceChildren(...items);
}

function sample(name) {
  return element("span", { className: `swatch ${name}` });
}

function swatch(colour, ink, letter) {
  const made = element("span", { className: "swatch" }, letter);
  made.style.background = colour;
  made.style.color = ink;
  return made;
}
