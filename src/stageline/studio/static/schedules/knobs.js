// Knobs: a slider and a number field for the same value.

import { element } from "../shared/elements.js";

/**
 * Return a knob. Its `show` sets the value without calling `onTurn`.
 *
 * The number field takes values beyond the slider, which is only as long as is useful.
 */
export function knob({ id, label, min, max, step, isWhole = false, hint = "" }, onTurn) {
  const slider = element("input", {
    type: "range", min, max, step, id: `${id}-slider`, aria: { label: `${label}, slider` },
  });
  const field = element("input", { type: "number", min, step: isWhole ? 1 : "any", id });
  const turn = (text) => {
    const value = Number(text);
    const isUsable = text !== "" && value >= min && (!isWhole || Number.isInteger(value));
    field.setAttribute("aria-invalid", String(!isUsable));
    if (isUsable) onTurn(value);
  };
  slider.addEventListener("input", () => {
    field.value = slider.value;
    turn(slider.value);
  });
  field.addEventListener("input", () => {
    slider.value = field.value;
    turn(field.value);
  });
  const node = element(
    "div", { className: "knob", title: hint }, element("label", { htmlFor: id }, label), slider, field,
  );
  return {
    node,
    show(given) {
      const value = Number.isFinite(given) ? given : "";
      slider.value = value;
      if (document.activeElement !== field) field.value = value;
      field.setAttribute("aria-invalid", "false");
    },
  };
}
