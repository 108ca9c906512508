// The layers as a bar: each as wide as its cost, with the cuts of a way, and the sums of its stages.

import { element } from "../shared/elements.js";
import { percent } from "../shared/numbers.js";
import { roving } from "../shared/roving.js";
import { svgElement } from "../shared/svg.js";
import { foldedTable } from "../shared/tables.js";
import { formatBytes, formatSeconds } from "../shared/units.js";

const MOST_SEGMENTS = 1500; // of more layers, several share a segment
const LAYER_HEIGHT = 36, STAGE_HEIGHT = 40, GAP = 6;
const LEAST_LABEL = 46; // pixels of a stage that has room for its time
const COLOURS = 8;

/** Draw the bar of a way's layers by one of their costs. */
export function drawLayers(container, result, way, cost) {
  const { names } = result.layers;
  const values = result.layers[cost];
  const format = cost === "time" ? formatSeconds : formatBytes;
  const total = values.reduce((sum, value) => sum + value, 0);
  const width = Math.max(280, container.clientWidth);
  const scale = total ? width / total : 0; // if nothing costs anything, there is no bar
  const note = element("p", { className: "hint", role: "status" }, "Point at a layer or a stage, or use the arrow keys.");
  const share = (value) => `${format(value)}, ${percent(total ? value / total : 0)}`;
  const say = (text) => () => note.replaceChildren(text);
  const svg = svgElement("svg", {
    class: "chart", width, height: LAYER_HEIGHT + GAP + STAGE_HEIGHT, role: "group", "aria-label": "Layers by cost",
  });
  const stages = stagesOf(way, values);
  const segments = segmentsOf(values).map(({ start, stop, before, sum }) => {
    const rank = stages.find((stage) => start < stage.stop).rank;
    const name = stop - start === 1 ? names[start] : `${names[start]} to ${names[stop - 1]}`;
    return part("layer", rank, [before * scale, 0, sum * scale, LAYER_HEIGHT], `${name}: ${share(sum)}`, say);
  });
  const blocks = stages.map((stage) => {
    const box = [stage.before * scale, LAYER_HEIGHT + GAP, stage.sum * scale, STAGE_HEIGHT];
    const block = part("stage", stage.rank, box, `${describe(stage)}: ${share(stage.sum)}`, say);
    if (box[2] >= LEAST_LABEL) {
      block.append(
        svgElement("text", { x: box[0] + box[2] / 2, y: box[1] + 16 }, `stage ${stage.number}`),
        svgElement("text", { x: box[0] + box[2] / 2, y: box[1] + 32 }, format(stage.sum, 3)),
      );
    }
    return block;
  });
  const cuts = stages.slice(1).map((stage) => {
    const x = stage.before * scale;
    return svgElement("line", { class: "cut", x1: x, x2: x, y1: -4, y2: LAYER_HEIGHT + GAP + STAGE_HEIGHT });
  });
  roving(segments);
  roving(blocks);
  svg.append(...segments, ...blocks, ...cuts);
  container.replaceChildren(svg, note, stageTable(stages, result.layers));
}

function part(kind, rank, [x, y, width, height], text, say) {
  const rect = svgElement("rect", { x, y, width: Math.max(0, width), height });
  const group = svgElement("g", { class: `${kind} colour-${rank % COLOURS}`, role: "img", "aria-label": text }, rect);
  group.addEventListener("pointerenter", say(text));
  group.addEventListener("focus", say(text));
  return group;
}

const RECOMPUTED = { never: "", always: ", recomputed", selective: ", recomputed selectively" };

function describe({ number, rank, start, stop, recomputed }) {
  const layers = stop - start === 1 ? `layer ${start}` : `layers ${start} to ${stop - 1}`;
  return `stage ${number} on rank ${rank}, ${layers}${RECOMPUTED[recomputed]}`;
}

function stagesOf(way, values) {
  let start = 0, before = 0;
  return way.balance.map((count, number) => {
    const stop = start + count;
    const sum = values.slice(start, stop).reduce((a, b) => a + b, 0);
    const stage = {
      number, start, stop, before, sum, rank: way.placement[number], recomputed: way.recompute[number],
    };
    start = stop;
    before += sum;
    return stage;
  });
}

function segmentsOf(values) {
  const size = Math.ceil(values.length / MOST_SEGMENTS);
  const segments = [];
  let before = 0;
  for (let start = 0; start < values.length; start += size) {
    const stop = Math.min(values.length, start + size);
    const sum = values.slice(start, stop).reduce((a, b) => a + b, 0);
    segments.push({ start, stop, before, sum });
    before += sum;
  }
  return segments;
}

function stageTable(stages, layers) {
  const sum = (values, { start, stop }) => values.slice(start, stop).reduce((a, b) => a + b, 0);
  const rows = stages.map((stage) => [
    String(stage.number), String(stage.rank), String(stage.stop - stage.start),
    formatSeconds(sum(layers.time, stage)), formatBytes(sum(layers.activation, stage)),
    formatBytes(sum(layers.parameters, stage)), stage.recomputed,
  ]);
  const heads = ["stage", "rank", "layers", "time", "activation", "parameters", "recomputed"];
  return foldedTable("Stages as a table", heads, rows);
}
