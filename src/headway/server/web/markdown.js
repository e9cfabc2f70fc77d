// Markdown that grows: shows the text of an answer while it is written. Builds nodes, never HTML from text.

import { parseBlocks } from "./markdown_blocks.js";
import { patch } from "./patch.js";

export class MarkdownView {
  constructor(element) {
    this.element = element;
    this.text = "";
    // More text cannot change these blocks any more: they are neither read nor touched again.
    this.settledChars = 0;
    this.settledBlocks = 0;
  }

  show(text) {
    const wanted = text.replaceAll("\r", "").replaceAll("\0", "\ufffd");
    if (!wanted.startsWith(this.text)) this.settledChars = this.settledBlocks = 0;
    this.text = wanted;
    const lines = wanted.slice(this.settledChars).split("\n");
    const blocks = parseBlocks(lines);
    patch(this.element, blocks.map(({ tree }) => tree), this.settledBlocks);
    this.#settle(lines, blocks);
  }

  /** A block begins where its first line says so, or (a table) its second; the last line may still become longer. */
  #settle(lines, blocks) {
    const last = blocks.findLastIndex(({ line }) => line + 1 < lines.length - 1);
    if (last <= 0) return;
    this.settledBlocks += last;
    for (let i = 0; i < blocks[last].line; i++) this.settledChars += lines[i].length + 1;
  }
}
