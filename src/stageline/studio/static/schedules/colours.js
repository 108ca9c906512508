// The page's colours for canvases, which cannot use the variables of theme.css themselves.

/** Return the colours of the theme that is active, as texts and as [red, green, blue]. */
export function themeColours() {
  const style = getComputedStyle(document.documentElement);
  const text = (name) => style.getPropertyValue(name).trim();
  return {
    text: text("--text"),
    quiet: text("--quiet"),
    accent: text("--accent"),
    pixels: {
      page: rgb(text("--page")),
      lane: rgb(text("--panel")),
      memory: rgb(text("--quiet")),
      over: rgb(text("--error")),
    },
  };
}

/** Return a colour such as #0072b2 as [red, green, blue]. */
export function rgb(text) {
  const value = parseInt(text.slice(1), 16);
  return [value >> 16, (value >> 8) & 255, value & 255];
}
