// Saving a schedule: pictures, its order, and the line of Python that makes it.

import { element } from "../shared/elements.js";
import { post } from "../shared/requests.js";

const FORMATS = [
  { suffix: "svg", label: "SVG", hint: "picture" },
  { suffix: "csv", label: "CSV", hint: "the order, as torch.distributed.pipelining reads it" },
  { suffix: "json", label: "Perfetto", hint: "trace for ui.perfetto.dev" },
];

/** Return buttons that save a figure; `requestOf` returns its request, `onError` shows a message. */
export function saveButtons(requestOf, onError) {
  const line = element("textarea", {
    className: "python", readOnly: true, rows: 3, hidden: true, aria: { label: "Python" },
  });
  const button = (label, title, work) => {
    const made = element("button", { type: "button", title }, label);
    made.addEventListener("click", () => work().catch(onError));
    return made;
  };
  const buttons = FORMATS.map(({ suffix, label, hint }) => button(label, hint, async () => {
    const response = await post("api/schedules/save", { ...requestOf(), suffix });
    const name = response.headers.get("content-disposition").match(/filename="(.*)"/)[1];
    download(await response.blob(), name);
  }));
  const python = button("Python", "the line that makes this timeline", async () => {
    const response = await post("api/schedules/save", { ...requestOf(), suffix: "py" });
    line.value = await response.text();
    line.hidden = false;
    line.select();
  });
  return { buttons: [...buttons, python], line };
}

function download(blob, name) {
  const address = URL.createObjectURL(blob);
  element("a", { href: address, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(address), 60_000);
}
