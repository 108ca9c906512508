// The address of a page holds its state, so that a link shows the same.

/** Return the state in the address over these defaults; unknown names are ignored. */
export function readState(defaults) {
  const given = new URLSearchParams(location.search);
  const state = { ...defaults };
  for (const name of Object.keys(defaults)) if (given.has(name)) state[name] = given.get(name);
  return state;
}

/** Put what differs from the defaults into the address, without a new entry in the history. */
export function writeState(state, defaults) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(state)) {
    if (String(value) !== String(defaults[name])) query.set(name, value);
  }
  const text = query.toString();
  history.replaceState(null, "", text ? `?${text}` : location.pathname);
}
