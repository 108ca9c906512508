// Tables, which say as text what pictures show.

import { element } from "./elements.js";

/** Return a table; cells are texts or elements. */
export function table(heads, rows) {
  const head = element("tr", {}, ...heads.map((text) => element("th", { scope: "col" }, text)));
  const body = rows.map((cells) => element("tr", {}, ...cells.map((cell) => element("td", {}, cell))));
  return element("table", {}, element("thead", {}, head), element("tbody", {}, ...body));
}

/** Return a part of the page that opens to show a table, and scrolls if it is large. */
export function foldedTable(title, heads, rows) {
  const scroll = element("div", { className: "scroll", tabIndex: 0, role: "region", aria: { label: title } },
    table(heads, rows));
  return element("details", {}, element("summary", {}, title), scroll);
}
