// The strips of the running requests. A request sits in a lane from its first step to its last, then the next one takes
// the lane: what scrolls by is continuous batching. The reader's own requests have lanes of their own, always on top.

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
    this.pinned = []; // lanes of the reader's own requests: {cells: string[], owners: number[], row | null, fresh, quiet}
    this.others = [];
    this.laneOf = new Map(); // request number → lane
    this.own = new Set(); // ids of the requests of this page's chat
    this.isAwaited = false; // the reader has sent a request, which of them is not known yet
    this.handovers = 0; // seats that were taken over while others kept running
    this.stepsPerS = 0;
  }

  get isEmpty() {
    return this.pinned.length + this.others.length === 0 && !this.isAwaited;
  }

  /** A request of the reader's is on its way; its id comes with its first token. */
  expect(isAwaited) {
    this.isAwaited = isAwaited;
  }

  /** This request is the reader's own. */
  claim(id) {
    this.isAwaited = false;
    this.own.add(id);
    const lane = this.others.find(({ row }) => row?.id === id);
    if (lane) this.#pin(lane);
  }

  /** Takes in a frame: every lane gets one cell per column. */
  add(frame, stepsPerS) {
    this.stepsPerS = stepsPerS;
    const entries = frame.rows.map(([number, id, prompt, computed, output, blocks, isRunning, cells, cached]) => ({
      number, id, prompt, computed, output, blocks, isRunning, cells, cached,
    }));
    const width = frame.columns.length;
    for (const lane of this.#all()) lane.fresh = null;
    for (const row of entries) {
      const lane = this.#seat(row);
      lane.row = row;
      lane.fresh = row;
    }
    for (const lane of this.#all()) this.#extend(lane, width);
    this.#free(new Set(entries.filter((row) => row.isRunning).map((row) => row.number)));
    for (const lanes of [this.pinned, this.others]) trim(lanes);
  }

  /** Nothing is known any more. */
  clear() {
    this.pinned = [];
    this.others = [];
    this.laneOf.clear();
    this.handovers = 0;
  }

  /** `scrolled`: by how much the reader has scrolled down; own lanes stay on top all the same. */
  draw(scrolled) {
    const numPinned = this.pinned.length + (this.isAwaited ? 1 : 0);
    const area = prepare(this.canvas, Math.max(MIN_ROWS, numPinned + this.others.length) * ROW + 2);
    if (!area) return;
    const { context, width } = area;
    context.font = FONT;
    context.textBaseline = "middle";
    const view = this.#view(width);
    this.others.forEach((lane, index) => this.#drawLane(context, lane, (numPinned + index) * ROW + 1, view));
    context.fillStyle = view.palette.sunken;
    context.fillRect(0, scrolled, width, numPinned > 0 ? numPinned * ROW + 2 : 0);
    this.pinned.forEach((lane, index) => this.#drawLane(context, lane, scrolled + index * ROW + 1, { ...view, isOwn: true }));
    if (this.isAwaited) drawAwaited(context, scrolled + this.pinned.length * ROW + 1, view);
  }

  /** In words, for those who do not see the picture. */
  describe() {
    const running = this.laneOf.size;
    if (running === 0) return this.isAwaited ? "Your request waits for its first token" : "No request is running";
    const own = this.pinned.find(({ row }) => row?.isRunning)?.row;
    const others = `${running} requests are running, one row each`;
    return own ? `${others}; yours, on top, has made ${own.output} tokens` : others;
  }

  #all() {
    return [...this.pinned, ...this.others];
  }

  #view(width) {
    const isNarrow = width < 480;
    const nameWidth = isNarrow ? 52 : 138;
    const countWidth = isNarrow ? 76 : 136;
    const stripWidth = width - nameWidth - countWidth;
    const column = this.stepsPerS > FAST_STEPS_PER_S ? 3 : 6;
    const visible = Math.floor(stripWidth / column);
    return { width, isNarrow, left: nameWidth, countWidth, stripWidth, column, visible, palette: colours() };
  }

  #seat(row) {
    let lane = this.laneOf.get(row.number);
    if (lane === undefined) {
      const lanes = this.own.has(row.id) ? this.pinned : this.others;
      lane = lanes.find((each) => isFree(each) && each.row?.number === row.number); // it was preempted
      if (lane === undefined) {
        lane = freeLane(lanes);
        if (lane.row && this.laneOf.size > 0) this.handovers += 1;
      }
      this.laneOf.set(row.number, lane);
    }
    return lane;
  }

  /** Its cells move up with it; those of who sat there before it stay. */
  #pin(lane) {
    const { row } = lane;
    const pinned = freeLane(this.pinned);
    const missing = lane.cells.length - pinned.cells.length;
    if (missing > 0) {
      pinned.cells.unshift(...Array(missing).fill("."));
      pinned.owners.unshift(...Array(missing).fill(-1));
    }
    for (let back = 1; back <= lane.cells.length; back++) {
      const [from, to] = [lane.cells.length - back, pinned.cells.length - back];
      if (lane.owners[from] !== row.number) continue;
      [pinned.cells[to], pinned.owners[to]] = [lane.cells[from], row.number];
      [lane.cells[from], lane.owners[from]] = [".", -1];
    }
    Object.assign(pinned, { row, fresh: lane.fresh, quiet: lane.quiet });
    Object.assign(lane, { row: null, fresh: null });
    if (row.isRunning) this.laneOf.set(row.number, pinned);
    trim(this.others);
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

  /** A frame tells of all that run; what is missing has left, perhaps with a frame that never came. */
  #free(running) {
    for (const [number, lane] of this.laneOf) {
      if (running.has(number)) continue;
      lane.row.isRunning = false;
      this.laneOf.delete(number);
    }
  }

  #drawLane(context, lane, y, view) {
    if (view.isOwn) {
      context.fillStyle = view.palette.own;
      context.fillRect(0, y, view.width, ROW);
    }
    this.#drawLabel(context, lane, y, view);
    this.#drawStrip(context, lane, y, view);
  }

  #drawLabel(context, lane, y, { isOwn, countWidth, width, isNarrow, palette }) {
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
      context.fillStyle = palette.preempted;
      if (look.isWrong) context.fillRect(x, y + 1, column - gap, 2);
      if (i > 0 && lane.owners[i] !== lane.owners[i - 1]) {
        context.fillStyle = ownerColour(lane.owners[i]);
        context.fillRect(x - 2, y + 1, 2, ROW - 2);
      }
    }
  }
}

const isFree = (lane) => lane.fresh === null && !lane.row?.isRunning;

/** The first free one; made if there is none. */
function freeLane(lanes) {
  const found = lanes.find((lane) => isFree(lane) && !isPreempted(lane.row));
  if (found) return found;
  lanes.push({ cells: [], owners: [], row: null, fresh: null, quiet: 0 });
  return lanes.at(-1);
}

/** Lanes at the end that were not used for long go away. */
function trim(lanes) {
  while (lanes.length > 0 && lanes.at(-1).row === null) lanes.pop();
}

/** The reader's request, before it is known which of them it is. */
function drawAwaited(context, y, { width, left, palette }) {
  const middle = y + ROW / 2;
  context.fillStyle = palette.own;
  context.fillRect(0, y, width, ROW);
  context.fillStyle = palette.text;
  context.font = `bold ${FONT}`;
  context.fillText("you", 18, middle);
  context.font = FONT;
  context.fillStyle = palette.dim;
  context.fillText("sent, no token yet", left, middle);
}

/** Out of the batch, but it will come back. */
const isPreempted = (row) => row !== null && !row.isRunning && /p\.*$/.test(row.cells);

const STATE_COLOURS = { prefill: "chunk", decode: "decode", preempted: "preempted", left: "dim" };

const LOOKS = {
  c: { colour: "chunk", height: 13 },
  h: { colour: "chunk", height: 13, stripes: true },
  d: { colour: "decode", height: 6 },
  a: { colour: "decode", height: 13 },
  r: { colour: "decode", height: 6, isWrong: true },
  i: { colour: "idle", height: 2 },
  p: { colour: "preempted", height: 13 },
};
