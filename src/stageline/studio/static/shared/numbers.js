// Numbers as the reports of Stageline write them.

const SUFFIXES = [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]];

/** Return a number with at most four digits, and a suffix if it is large. */
export function shortNumber(value) {
  if (Math.abs(value) >= 9999.5) {
    for (const [size, suffix] of SUFFIXES) {
      if (Math.abs(value) >= size) return `${fourDigits(value / size)}${suffix}`;
    }
  }
  return fourDigits(value);
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

function fourDigits(value) {
  return String(Number(value.toPrecision(4)));
}
