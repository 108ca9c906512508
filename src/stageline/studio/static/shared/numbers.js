// Numbers as the reports of Stageline write them.

const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

const MOST_DIGITS = 7; // of a tick: there is room for them

/** Return a number with at most four digits, and a suffix if it is large. */
export function shortNumber(value) {
  return roundedNumber(value, 4);
}

/** Return a number with at most so many digits, and a suffix if it is large. */
export function roundedNumber(value, digits) {
  if (Math.abs(value) >= 9999.5) {
    for (const [size, suffix] of SUFFIXES) {
      if (Math.abs(value) >= size) return `${rounded(value / size, digits)}${suffix}`;
    }
  }
  return rounded(value, digits);
}

/** Return with how many digits these ticks can be told apart: four, or more. */
export function digitsOf(ticks) {
  const distance = ticks.length > 1 ? ticks[1] - ticks[0] : 0;
  for (let digits = 4; digits < MOST_DIGITS; digits++) {
    if (ticks.every((tick) => Math.abs(Number(tick.toPrecision(digits)) - tick) <= distance / 100)) return digits;
  }
  return MOST_DIGITS;
}

/** Return a fraction in percent. */
export function percent(share) {
  return `${(100 * share).toFixed(1)} %`;
}

/** Return a change in percent, with its sign. */
export function signedPercent(change) {
  const sign = change > 0 ? "+" : change < 0 ? "−" : "";
  return sign + percent(Math.abs(change));
}

function rounded(value, digits) {
  return String(Number(value.toPrecision(digits)));
}
