// The strips of the running requests. A request sits in a lane from its first step to its last, then the next one takes
// the lane: what scrolls by is continuous batching.

import { colours, FONT, ownerColour, prepare } from "./canvas.js";

const MAX_COLUMNS = 700;
const ROW = 16;
const MIN_ROWS = 16;
const STRIPED = 9;
const FAST_STEPS_PER_S = 60;
const QUIET_COLUMNS = 110;

export class Lanes {
  constructor(canvas) {
    this.canvas = canvas;
    this.lanes = []; // {cells: string[], owners: number[], row | null}
    this.laneOf = new Map(); // request number → lane
    this.own = new Set(); // ids of the requests of this page's chat
    this.handovers = 0; // seats that were taken over while others kept running
    this.stepsPerS = 0;
  }

  get isEmpty() {
    return this.lanes.length === 0;
  }

  /** This request is the reader's own. */
  claim(id) {
    this.own.add(id);
  }

  /** Takes in a frame: every lane gets one cell per column. */
  add(frame, stepsPerS) {
    this.stepsPerS = stepsPerS;
    const entries = frame.rows.map(([number, id, prompt, computed, output, blocks, isRunning, cells, cached]) => ({
      number, id, prompt, computed, output, blocks, isRunning, cells, cached,
    }));
    const width = frame.columns.length;
    for (const lane of this.lanes) lane.fresh = null;
    for (const row of entries) {
      const lane = this.lanes[this.#seat(row)];
      lane.row = row;
      lane.fresh = row;
    }
    for (const lane of this.lanes) this.#extend(lane, width);
    this.#free(new Set(entries.filter((row) => row.isRunning).map((row) => row.number)));
    this.#trim();
  }

  /** Nobody is left, whatever was missed. */
  clear() {
    this.lanes = [];
    this.laneOf.clear();
  }

  draw() {
    const wanted = Math.max(MIN_ROWS, this.lanes.length) * ROW + 2;
    const area = prepare(this.canvas, wanted);
    if (!area) return;
    const { context, width } = area;
    const palette = colours();
    context.font = FONT;
    context.textBaseline = "middle";
    const isNarrow = width < 480;
    const nameWidth = isNarrow ? 52 : 138;
    const countWidth = isNarrow ? 76 : 136;
    const stripWidth = width - nameWidth - countWidth;
    const column = this.stepsPerS > FAST_STEPS_PER_S ? 3 : 6;
    const visible = Math.floor(stripWidth / column);
    this.lanes.forEach((lane, index) => {
      const y = index * ROW + 1;
      if (lane.row && this.own.has(lane.row.id)) {
        context.fillStyle = palette.own;
        context.fillRect(0, y, width, ROW);
      }
      this.#drawLabel(context, lane, y, { countWidth, width, isNarrow, palette });
      this.#drawStrip(context, lane, y, { left: nameWidth, visible, column, palette, stripWidth });
    });
  }

  /** In words, for those who do not see the picture. */
  describe() {
    const running = this.laneOf.size;
    return running === 0 ? "No request is running" : `${running} requests are running, one row each`;
  }

  #seat(row) {
    let index = this.laneOf.get(row.number);
    if (index === undefined) {
      const isFree = (lane) => lane.fresh === null && !lane.row?.isRunning;
      index = this.lanes.findIndex((lane) => isFree(lane) && lane.row?.number === row.number); // it was preempted
      if (index < 0) {
        index = this.lanes.findIndex((lane) => isFree(lane) && !isPreempted(lane.row));
        if (index >= 0 && this.lanes[index].row && this.laneOf.size > 0) this.handovers += 1;
      }
      if (index < 0) index = this.lanes.push({ cells: [], owners: [], row: null, fresh: null, quiet: 0 }) - 1;
      this.laneOf.set(row.number, index);
    }
    return index;
  }

  #extend(lane, width) {
    const cells = lane.fresh?.cells ?? "";
    for (let i = 0; i < width; i++) {
      const cell = cells[i] ?? ".";
      lane.cells.push(cell);
      lane.owners.push(cell === "." ? -1 : lane.fresh.number);
    }
    lane.quiet = lane.fresh ? 0 : lane.quiet + width;
    if (lane.quiet > QUIET_COLUMNS) lane.row = null;
    if (lane.cells.length > MAX_COLUMNS) {
      lane.cells.splice(0, lane.cells.length - MAX_COLUMNS);
      lane.owners.splice(0, lane.owners.length - MAX_COLUMNS);
    }
  }

  /** A frame tells of everybody who runs; who is missing has left, perhaps with a frame that never came. */
  #free(running) {
    for (const [number, index] of this.laneOf) {
      if (running.has(number)) continue;
      this.lanes[index].row.isRunning = false;
      this.laneOf.delete(number);
    }
  }

  /** Lanes at the end that nobody has used for long go away. */
  #trim() {
    while (this.lanes.length > 0 && this.lanes.at(-1).row === null) this.lanes.pop();
  }

  #drawLabel(context, lane, y, { countWidth, width, isNarrow, palette }) {
    const row = lane.row;
    if (!row) return;
    const middle = y + ROW / 2;
    context.globalAlpha = row.isRunning || isPreempted(row) ? 1 : 0.45;
    context.fillStyle = ownerColour(row.number);
    context.beginPath();
    context.arc(9, middle, 3.5, 0, 7);
    context.fill();
    const isPrefill = row.isRunning && row.computed < row.prompt;
    const state = isPrefill ? "prefill" : row.isRunning ? "decode" : isPreempted(row) ? "preempted" : "left";
    context.fillStyle = row.isRunning ? palette.text : palette.dim;
    const isOwn = this.own.has(row.id);
    if (isOwn) context.font = `bold ${FONT}`;
    context.fillText(isOwn ? "you" : `#${row.number + 1}`, 18, middle);
    context.font = FONT;
    if (!isNarrow) {
      context.fillStyle = palette[STATE_COLOURS[state]];
      context.fillText(state, 66, middle);
    }
    const found = Math.min(row.cached, row.prompt);
    const computed = found > 0 ? `+${row.prompt - found}` : `${row.prompt}`;
    const long = isPrefill ? `${row.computed}/${row.prompt} in` : `${computed} in  ${row.output} out`;
    const text = isNarrow ? `${row.prompt} → ${row.output}` : long;
    context.fillStyle = palette.dim;
    context.textAlign = "right";
    context.fillText(text, width - 6, middle, countWidth - 12);
    if (found > 0 && !isNarrow && !isPrefill) {
      context.fillStyle = palette.reused;
      context.fillText(`${found}`, width - 6 - context.measureText(text).width, middle);
    }
    context.textAlign = "left";
    context.globalAlpha = 1;
  }

  #drawStrip(context, lane, y, { left, visible, column, palette, stripWidth }) {
    const first = Math.max(0, lane.cells.length - visible);
    const start = left + stripWidth - (lane.cells.length - first) * column;
    const gap = column > 3 ? 1 : 0;
    for (let i = first; i < lane.cells.length; i++) {
      const cell = lane.cells[i];
      if (cell === ".") continue;
      const x = start + (i - first) * column;
      const look = LOOKS[cell];
      context.fillStyle = palette[look.colour];
      const top = y + (ROW - look.height) / 2;
      const striped = look.stripes ? STRIPED : 0;
      context.fillRect(x, top + striped, column - gap, look.height - striped);
      context.fillStyle = palette.reused;
      for (let line = 0; line < striped; line += 3) context.fillRect(x, top + line, column - gap, 2);
      if (i > 0 && lane.owners[i] !== lane.owners[i - 1]) {
        context.fillStyle = ownerColour(lane.owners[i]);
        context.fillRect(x - 2, y + 1, 2, ROW - 2);
      }
    }
  }
}

/** Out of the batch, but it will come back. */
const isPreempted = (row) => row !== null && !row.isRunning && /p\.*$/.test(row.cells);

const STATE_COLOURS = { prefill: "chunk", decode: "decode", preempted: "preempted", left: "dim" };

const LOOKS = {
  c: { colour: "chunk", height: 13 },
  h: { colour: "chunk", height: 13, stripes: true },
  d: { colour: "decode", height: 6 },
  i: { colour: "idle", height: 2 },
  p: { colour: "preempted", height: 13 },
};
