// Elements of a page, made in one expression.

/** Return an element with these properties; `data` and `aria` are objects, children nodes or texts. */
export function element(tag, { data = {}, aria = {}, ...properties } = {}, ...children) {
  const made = Object.assign(document.createElement(tag), properties);
  Object.assign(made.dataset, data);
  for (const [name, value] of Object.entries(aria)) made.setAttribute(`aria-${name}`, value);
  made.append(...children);
  return made;
}

/** Set the text of an element, unless it has it: what is set is read aloud again. */
export function setText(node, text) {
  if (node.textContent !== text) node.textContent = text;
}

/** Return the element of the page with this id. */
export function byId(id) {
  return document.getElementById(id);
}
