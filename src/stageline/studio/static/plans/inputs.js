// The profile and the cluster: built-in examples, or the user's own, which this tab keeps.

import { post } from "../shared/requests.js";

const KEY = "stageline-plans-";

/** Return the names and titles of the built-in examples. */
export async function listExamples() {
  return (await post("api/plans/example", {})).json();
}

/** Return the profile, the cluster and the batch size of an example. */
export async function readExample(name) {
  return (await post("api/plans/example", { name })).json();
}

/** Keep texts in this tab and return their name in the address; '' if they are too long for it. */
export async function keep(texts) {
  const text = JSON.stringify(texts);
  const digest = await crypto.subtle.digest("SHA-256", new TextEncoder().encode(text));
  const bytes = [...new Uint8Array(digest, 0, 8)];
  const name = bytes.map((byte) => byte.toString(16).padStart(2, "0")).join("");
  if (store(KEY + name, text)) return name;
  for (const key of Object.keys(sessionStorage)) if (key.startsWith(KEY)) sessionStorage.removeItem(key);
  return store(KEY + name, text) ? name : ""; // without the earlier ones there may be room
}

/** Return the texts that this tab keeps under a name, or null. */
export function kept(name) {
  const text = sessionStorage.getItem(KEY + name);
  return text && JSON.parse(text);
}

function store(key, text) {
  try {
    sessionStorage.setItem(key, text);
    return true;
  } catch {
    return false;
  }
}
