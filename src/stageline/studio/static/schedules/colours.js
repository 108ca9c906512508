// The page's colours for canvases, which cannot use the variables of theme.css themselves.

import { rgb } from "./raster.js";

/** Return the colours of the theme that is active, as texts and as [red, green, blue]. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const text = (name) => style.getPropertyValue(name).trim();
  const colours = { text: text("--text"), quiet: text("--quiet"), accent: text("--accent") };
  return {
    ...colours,
    pixels: {
      page: rgb(text("--page")),
      lane: rgb(text("--panel")),
      memory: rgb(text("--quiet")),
      over: rgb(text("--error")),
    },
  };
}
