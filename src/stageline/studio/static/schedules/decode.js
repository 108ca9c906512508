// The server's answer: a header in JSON, and arrays in the same buffer, without a copy.

const TYPES = {
  f8: Float64Array, f4: Float32Array, i4: Int32Array, u2: Uint16Array, u1: Uint8Array,
};
const LENGTH_BYTES = 4;

/** Return the timelines in a buffer; one that could not be made has an `error` instead. */
export function decodeTimelines(buffer) {
  const length = new DataView(buffer).getUint32(0, true);
  const text = new TextDecoder().decode(new Uint8Array(buffer, LENGTH_BYTES, length));
  const first = LENGTH_BYTES + length;
  return JSON.parse(text).map(({ arrays = {}, ...header }) => {
    for (const [name, [type, offset, count]] of Object.entries(arrays)) {
      header[name] = new TYPES[type](buffer, first + offset, count);
    }
    return header;
  });
}
