// Knobs: a slider and a number field for the same value.

import { element } from "../shared/elements.js";

/**
 * Return a knob. Its `show` sets the value without calling `onTurn`.
 *
 * The number field takes values beyond the slider, which is only as long as is useful; `most` is
 * the largest that can be used. What cannot be is explained in the field's `validationMessage`.
 */
export function knob({ id, label, min, max, most = Infinity, step, isWhole = false, hint = "", name = label }, onTurn) {
  const slider = element("input", {
    type: "range", min, max, step, id: `${id}-slider`, aria: { label: `${name}, slider` },
  });
  const field = element("input", { type: "number", min, step: isWhole ? 1 : "any", id, aria: { label: name } });
  const mark = (isUsable) => {
    const given = field.validity.badInput ? "not a number" : field.value || "empty";
    const range = most < Infinity ? `from ${min} to ${most}` : `of at least ${min}`;
    field.setAttribute("aria-invalid", String(!isUsable));
    field.setCustomValidity(isUsable ? "" : `${name} is ${given}: use a ${isWhole ? "whole " : ""}number ${range}`);
  };
  const turn = (text) => {
    const value = Number(text);
    const isUsable = text !== "" && value >= min && value <= most && (!isWhole || Number.isInteger(value));
    mark(isUsable);
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
      if (document.activeElement === field) return;
      field.value = value;
      mark(true);
    },
  };
}
