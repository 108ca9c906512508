// Parts of an SVG picture. Text is set as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** Return an SVG element with these attributes; children are elements or texts. */
export function svgElement(name, attributes = {}, ...children) {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}
