// Scales map values to pixels, and know where their ticks are.

const ROUND = [1, 2, 5, 10];
const MOST_LINEAR_RATIO = 8; // of the largest to the smallest value; beyond it a scale is logarithmic
const MOST_POWERS = 8; // of two as ticks

/** Return a linear scale from values to pixels. */
export function linearScale([low, high], [start, end]) {
  const width = high - low || 1;
  const scale = (value) => start + ((value - low) / width) * (end - start);
  scale.invert = (pixel) => low + ((pixel - start) / (end - start)) * width;
  scale.ticks = (count) => linearTicks(low, high, count);
  scale.domain = [low, high];
  return scale;
}

/** Return a scale for amounts: logarithmic if they differ by much; ticks may be of bytes. */
export function amountScale([low, high], range, { inBytes = false, isLogarithmic = high / low > MOST_LINEAR_RATIO } = {}) {
  if (!isLogarithmic || low <= 0) {
    const pad = 0.06 * (high - low || high);
    const scale = linearScale([Math.max(0, low - pad), high + pad], range);
    const unit = inBytes && high >= 1 ? 1024 ** Math.floor(Math.log2(high) / 10) : 1;
    scale.ticks = (count) => linearTicks(scale.domain[0] / unit, scale.domain[1] / unit, count)
      .map((tick) => tick * unit);
    return scale;
  }
  const margin = Math.max(1.02, (high / low) ** 0.05);
  const logarithmic = linearScale([Math.log(low / margin), Math.log(high * margin)], range);
  const scale = (value) => logarithmic(Math.log(value));
  scale.invert = (pixel) => Math.exp(logarithmic.invert(pixel));
  const ticks = inBytes ? powersOfTwo : logarithmicTicks;
  scale.ticks = (count) => {
    const found = ticks(low / margin, high * margin);
    return found.length > 1 ? found : linearTicks(low / margin, high * margin, count);
  };
  scale.domain = [low / margin, high * margin];
  scale.isLogarithmic = true;
  return scale;
}

function linearTicks(low, high, count) {
  const rough = (high - low) / Math.max(1, count) || 1;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * ROUND.find((factor) => factor * power >= rough * 0.999);
  const ticks = [];
  for (let n = Math.ceil(low / step - 1e-9); n * step <= high + step * 1e-9; n++) ticks.push(n * step);
  return ticks;
}

function logarithmicTicks(low, high) {
  const factors = high / low > 1e3 ? [1] : [1, 2, 5];
  const ticks = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
    for (const factor of factors) {
      const tick = factor * 10 ** power;
      if (tick >= low && tick <= high) ticks.push(tick);
    }
  }
  return ticks;
}

function powersOfTwo(low, high) {
  const first = Math.ceil(Math.log2(low)), last = Math.floor(Math.log2(high));
  const step = Math.ceil((last - first + 1) / MOST_POWERS);
  const ticks = [];
  for (let power = first; power <= last; power += step) ticks.push(2 ** power);
  return ticks;
}

/** Return the smallest and the largest of values, or null if there are none. */
export function extentOf(values) {
  let low = Infinity, high = -Infinity;
  for (const value of values) {
    low = Math.min(low, value);
    high = Math.max(high, value);
  }
  return low <= high ? [low, high] : null;
}
