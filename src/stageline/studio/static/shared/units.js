// Amounts as text, in the units that people read.

const BINARY = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];

/** Return a size in bytes like '22GiB', as the terminal shows it. */
export function formatBytes(size, digits = 4) {
  const [unit, scale] = BINARY.find(([, scale]) => Math.abs(size) >= scale) ?? ["B", 1];
  return rounded(size / scale, digits) + unit;
}

/** Return a duration like '12.3 ms'. */
export function formatSeconds(seconds, digits = 4) {
  const size = Math.abs(seconds);
  if (size >= 1 || size === 0) return `${rounded(seconds, digits)} s`;
  if (size >= 1e-3) return `${rounded(1e3 * seconds, digits)} ms`;
  return `${rounded(1e6 * seconds, digits)} µs`;
}

/** Return a count with its noun: '1 rank', '2 ranks'. */
export function counted(count, singular, plural = `${singular}s`) {
  return `${count.toLocaleString("en")} ${count === 1 ? singular : plural}`;
}

function rounded(value, digits) {
  const short = Number(value.toPrecision(digits));
  const isPlain = short === 0 || (Math.abs(short) >= 1e-4 && Math.abs(short) < 1e7);
  return isPlain ? String(short) : short.toExponential();
}
