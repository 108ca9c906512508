// The colours of the actions that are shown.

import { element } from "../shared/elements.js";
import { kindInWords } from "./timeline.js";

/** Fill the list of colours: one for each kind, and for each chunk if ranks have several stages. */
export function fillLegend(list, timelines) {
  const good = timelines.filter(({ error }) => !error);
  const most = good.reduce((a, b) => (a && a.colours[0].length >= b.colours[0].length ? a : b), null);
  const kinds = most ? most.kinds.filter((_, code) => good.some(({ kindOf }) => kindOf.includes(code))) : [];
  const items = kinds.map((kind) => {
    const shades = most.colours[most.kinds.indexOf(kind)];
    const swatches = shades.map(([colour, ink], chunk) => swatch(
      colour, ink, kind[0], shades.length > 1 ? `stage ${chunk + 1} of a rank` : "",
    ));
    return element("li", {}, ...swatches, ` ${kindInWords(kind)}`);
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

function swatch(colour, ink, letter, title) {
  const made = element("span", { className: "swatch", title }, letter);
  made.style.background = colour;
  made.style.color = ink;
  return made;
}
