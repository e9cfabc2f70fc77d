// The KV cache, one cell per block (or per few blocks, if there are many), in the colour of who holds it. A block that
// several requests hold has a hole in the middle, where cells are large enough.

import { colours, ownerColour, prepare } from "./canvas.js";

const [FREE, CACHED, SHARED] = [-1, -2, -3];
const SMALLEST_WITH_HOLE = 6;

const NAMES = { [FREE]: "free", [CACHED]: "cached", [SHARED]: "reused" };

export class BlockMap {
  constructor(canvas) {
    this.canvas = canvas;
    this.map = null;
  }

  /** Takes in a frame's map, if it has one. */
  add(frame) {
    if (frame.blocks) this.map = frame.blocks;
  }

  /** As if all blocks were free: they are, whatever was missed, or nothing is known of them. */
  clear() {
    if (this.map) this.map = { ...this.map, runs: [FREE, this.map.num_cells] };
  }

  /** Before the first map: so many blocks, all free. */
  size(numBlocks) {
    if (this.map && this.map.num_cells * this.map.blocks_per_cell >= numBlocks) return;
    const perCell = Math.max(1, Math.ceil(numBlocks / 1920));
    const cells = Math.ceil(numBlocks / perCell);
    this.map = { runs: [FREE, cells], num_cells: cells, blocks_per_cell: perCell };
  }

  draw() {
    const area = prepare(this.canvas);
    if (!area || !this.map) return;
    const { context, width, height } = area;
    const palette = colours();
    const { runs, num_cells: cells } = this.map;
    const pitch = cellPitch(cells, width, height);
    const perRow = Math.max(1, Math.floor(width / pitch));
    const gap = pitch > 5 ? 1.5 : pitch > 3 ? 1 : 0.5;
    let index = 0;
    for (let r = 0; r < runs.length; r += 2) {
      const owner = runs[r];
      context.fillStyle = owner >= 0 ? ownerColour(owner) : palette[NAMES[owner]];
      const side = pitch - gap;
      for (const end = index + runs[r + 1]; index < end; index++) {
        const [x, y] = [(index % perRow) * pitch, Math.floor(index / perRow) * pitch];
        context.fillRect(x, y, side, side);
        if (owner === SHARED && side >= SMALLEST_WITH_HOLE) context.clearRect(x + side / 3, y + side / 3, side / 3, side / 3);
      }
    }
  }
}

/** The largest square that lets all cells fit into the box. */
function cellPitch(cells, width, height) {
  let pitch = Math.min(26, Math.sqrt((width * height) / cells));
  while (pitch > 1.5 && Math.ceil(cells / Math.floor(width / pitch)) * pitch > height) pitch -= 0.25;
  return pitch;
}
