// Markdown inside of a block: emphasis, code, links, breaks. Text in, trees for patch.js out.
//
// One pass with a stack of what is open. The stack is short and every search is bounded, so no text takes long. What is
// never closed is text. Images are shown as links: a page must not fetch what a model names.

import { element } from "./patch.js";

const MAX_OPEN = 32;
const MAX_RUN = 6; // longer runs of * or _ are decoration
const MAX_LINK = 2000;
const MAX_PARENS = 8;

const SAFE_LINK = /^(?:https?:\/\/[^\s/]|mailto:[^\s])/i;
const PLAIN = /[^\\`*_~[\]!<h\n]+/y;
const PUNCTUATION = /[!-/:-@[-`{-~]/;
const BETWEEN = /[\s\p{P}\p{S}]/u;
const POINTED_LINK = /<((?:https?:\/\/|mailto:)[^\s<>]+)>/iy;
const BARE_LINK = /https?:\/\/[^\s<>"`*[\]{}|\\^]+/iy;
const TAGS = { "*1": "em", _1: "em", "*2": "strong", _2: "strong", "~2": "del" };

export function parseInline(text) {
  return new InlineParser(text).parse();
}

class InlineParser {
  constructor(text) {
    this.text = text;
    this.at = 0;
    this.open = [{ mark: "", children: [] }]; // the first is the text itself
    this.ticks = null; // length of a run of backticks → where such runs begin, those ahead only
  }

  parse() {
    while (this.at < this.text.length) this.#step();
    this.#giveUp(0);
    return this.open[0].children;
  }

  #step() {
    const plain = matchAt(PLAIN, this.text, this.at);
    if (plain) return this.#write(plain[0], plain[0].length);
    const char = this.text[this.at];
    if (char === "\\") return this.#escape();
    if (char === "`") return this.#code();
    if (char === "\n") return this.#lineEnd();
    if (char === "*" || char === "_" || char === "~") return this.#run(char);
    if (char === "[") return this.#enter("[");
    if (char === "!") return this.text[this.at + 1] === "[" ? this.#enter("![") : this.#write("!", 1);
    if (char === "]") return this.#leaveLink();
    return this.#autolink(char);
  }

  /** Adds text, and goes on behind so many characters. */
  #write(text, length) {
    append(this.open.at(-1).children, text);
    this.at += length;
  }

  #escape() {
    const next = this.text[this.at + 1] ?? "";
    if (next === "\n") this.#break(2);
    else if (PUNCTUATION.test(next)) this.#write(next, 2);
    else this.#write("\\", 1);
  }

  #lineEnd() {
    const { children } = this.open.at(-1);
    const last = children.at(-1);
    const isHard = typeof last === "string" && last.endsWith("  ");
    if (typeof last === "string") children[children.length - 1] = last.trimEnd();
    if (isHard) this.#break(1);
    else this.#write("\n", 1);
  }

  #break(length) {
    this.open.at(-1).children.push(element("br"));
    this.at += length;
  }

  // ---- code ---------------------------------------------------------------------------------------------------------

  #code() {
    const length = runLength(this.text, this.at);
    const start = this.at + length;
    const end = this.#nextTicks(length, start);
    if (end === undefined) return this.#write("`".repeat(length), length);
    let code = this.text.slice(start, end).replaceAll("\n", " ");
    if (code.startsWith(" ") && code.endsWith(" ") && code.trim()) code = code.slice(1, -1);
    this.open.at(-1).children.push(element("code", [code]));
    this.at = end + length;
  }

  #nextTicks(length, from) {
    this.ticks ??= findTicks(this.text);
    const places = this.ticks.get(length) ?? [];
    while (places.length > 0 && places.at(-1) < from) places.pop();
    return places.at(-1);
  }

  // ---- emphasis -----------------------------------------------------------------------------------------------------

  #run(char) {
    const start = this.at;
    const length = runLength(this.text, start);
    this.at += length;
    let left = length;
    if (length <= MAX_RUN && (char !== "~" || length === 2)) {
      const { canOpen, canClose } = sidesOf(char, this.text[start - 1], this.text[this.at]);
      if (canClose) left = this.#closeRun(char, left);
      if (canOpen) left = this.#openRun(char, left);
    }
    append(this.open.at(-1).children, char.repeat(left));
  }

  /** Returns how many are left. */
  #closeRun(char, count) {
    let left = count;
    while (left > 0) {
      const index = this.#opener(char, left);
      if (index < 0) return left;
      const { size } = this.open[index];
      this.#giveUp(index);
      const { children } = this.open.pop();
      this.open.at(-1).children.push(element(TAGS[`${char}${size}`], children));
      left -= size;
    }
    return 0;
  }

  /** The innermost that so many can close; ** rather closes ** than *. */
  #opener(char, count) {
    const fits = (frame) => frame.mark[0] === char && frame.children.length > 0;
    const exact = count <= 2 ? this.open.findLastIndex((frame) => fits(frame) && frame.size === count) : -1;
    return exact >= 0 ? exact : this.open.findLastIndex((frame) => fits(frame) && frame.size <= count);
  }

  #openRun(char, count) {
    for (let left = count; left > 0; ) {
      const size = Math.min(2, left);
      this.#push({ mark: char.repeat(size), size, children: [] });
      left -= size;
    }
    return 0;
  }

  // ---- links --------------------------------------------------------------------------------------------------------

  #enter(mark) {
    this.#push({ mark, isLink: true, children: [] });
    this.at += mark.length;
  }

  #leaveLink() {
    const index = this.open.findLastIndex((frame) => frame.isLink);
    const target = index < 0 || this.open[index].isInsideOut ? null : readTarget(this.text, this.at + 1);
    if (target === null || !SAFE_LINK.test(target.link)) {
      if (index >= 0) this.#giveUp(index - 1);
      return this.#write("]", 1);
    }
    this.#giveUp(index);
    const { children } = this.open.pop();
    this.open.at(-1).children.push(anchor(target.link, children.length > 0 ? children : [target.link]));
    for (const frame of this.open) if (frame.isLink) frame.isInsideOut = true; // a link holds no link
    this.at = target.end;
  }

  #autolink(char) {
    const isFree = !this.open.some((frame) => frame.isLink);
    const pointed = char === "<" && isFree ? matchAt(POINTED_LINK, this.text, this.at) : null;
    if (pointed && SAFE_LINK.test(pointed[1])) return this.#link(pointed[1], pointed[0].length);
    const isStart = char === "h" && isFree && !/\w/.test(this.text[this.at - 1] ?? "");
    const bare = isStart ? matchAt(BARE_LINK, this.text, this.at) : null;
    const link = bare ? withoutTail(bare[0]) : "";
    if (SAFE_LINK.test(link)) return this.#link(link, link.length);
    return this.#write(char, 1);
  }

  #link(link, length) {
    this.open.at(-1).children.push(anchor(link, [link]));
    this.at += length;
  }

  // ---- the stack ----------------------------------------------------------------------------------------------------

  #push(frame) {
    if (this.open.length > MAX_OPEN) this.#giveUp(0);
    this.open.push(frame);
  }

  /** What was opened behind `index` was no mark after all. */
  #giveUp(index) {
    const { children } = this.open[index];
    for (const frame of this.open.splice(index + 1)) {
      append(children, frame.mark);
      for (const child of frame.children) append(children, child);
    }
  }
}

/** Neighbouring strings are one. */
function append(children, child) {
  if (child === "") return;
  if (typeof child === "string" && typeof children.at(-1) === "string") children[children.length - 1] += child;
  else children.push(child);
}

function anchor(link, children) {
  return element("a", children, { href: link, title: link, target: "_blank", rel: "noopener noreferrer" });
}

function matchAt(pattern, text, at) {
  pattern.lastIndex = at;
  return pattern.exec(text);
}

function runLength(text, at) {
  let end = at + 1;
  while (text[end] === text[at]) end += 1;
  return end - at;
}

/** The last first, so that those passed can be taken off the end. */
function findTicks(text) {
  const places = new Map();
  const runs = [...text.matchAll(/`+/g)].reverse();
  for (const { 0: run, index } of runs) {
    if (!places.has(run.length)) places.set(run.length, []);
    places.get(run.length).push(index);
  }
  return places;
}

/** By what stands on both sides; an underscore inside of a word is part of it. */
function sidesOf(char, before = " ", after = " ") {
  const isOpening = !/\s/.test(after) && (!BETWEEN.test(after) || BETWEEN.test(before));
  const isClosing = !/\s/.test(before) && (!BETWEEN.test(before) || BETWEEN.test(after));
  if (char !== "_") return { canOpen: isOpening, canClose: isClosing };
  return { canOpen: isOpening && (!isClosing || BETWEEN.test(before)), canClose: isClosing && (!isOpening || BETWEEN.test(after)) };
}

/** `(link)` or `(link "title")` → {link, end}. */
function readTarget(text, at) {
  if (text[at] !== "(") return null;
  const limit = Math.min(text.length, at + MAX_LINK);
  let [end, parens] = [at + 1, 0];
  for (; end < limit && !/[\s<>]/.test(text[end]); end++) {
    if (text[end] === "(" && ++parens > MAX_PARENS) return null;
    if (text[end] === ")" && --parens < 0) break;
  }
  const link = text.slice(at + 1, end);
  const close = /[ \t]*(?:"[^"\n]{0,300}"|'[^'\n]{0,300}')?[ \t]{0,9}\)/y;
  const rest = end < limit ? matchAt(close, text, end) : null;
  return rest === null ? null : { link, end: end + rest[0].length };
}

/** A bare link without the punctuation of the sentence around it. */
function withoutTail(link) {
  const count = (char) => link.split(char).length - 1;
  let unmatched = count(")") - count("(");
  let end = link.length;
  for (; end > 0; end--) {
    const char = link[end - 1];
    if (char === ")" && unmatched > 0) unmatched -= 1;
    else if (!/[.,:;!?'_~]/.test(char)) break;
  }
  return link.slice(0, end);
}
