// Ask the studio to search, and read its progress line by line.

import { post, StudioError } from "../shared/requests.js";

/** Return the result of a search: "compare" or "save"; `progress` is called with words meanwhile. */
export async function search(kind, fields, progress, signal) {
  const response = await post(`api/plans/${kind}`, fields, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let text = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new StudioError("the studio ended the search: if it has ended too, start it again, and open the address that it prints");
    text += value;
    const lines = text.split("\n");
    text = lines.pop();
    for (const line of lines) {
      const message = JSON.parse(line);
      if ("error" in message) throw new StudioError(message.error);
      if ("result" in message) return message.result;
      progress(message.progress);
    }
  }
}
