// Markdown's blocks: paragraphs, headings, lists, quotes, tables, code, rules. Lines in, trees for patch.js out.
//
// As models write it rather than to the letter of CommonMark: line breaks are kept, two spaces nest a list below any
// marker, what is not closed ends with the text. HTML is text like any other. Every line is read once for each level of
// nesting, and levels are limited, so no text takes long.

import { parseInline } from "./markdown_inline.js";
import { element } from "./patch.js";

const MAX_DEPTH = 12;
const NEST_COLUMNS = 2;
const FIRST_HEADING = 3; // the page itself has h1 and h2
const LAST_HEADING = 6;

/** Lines → [{line, tree}]: the blocks, each with the number of its first line. */
export function parseBlocks(lines, depth = 0) {
  const blocks = [];
  for (let at = 0; at < lines.length; ) {
    if (isBlank(lines[at])) {
      at += 1;
      continue;
    }
    const { tree, end } = readBlock(lines, at, depth);
    blocks.push({ line: at, tree });
    at = end;
  }
  return blocks;
}

/** Each reader gives {tree, end}, or null if its kind of block does not begin here. */
function readBlock(lines, at, depth) {
  return readSpecial(lines, at, depth) ?? readParagraph(lines, at, depth);
}

function readSpecial(lines, at, depth) {
  return readFence(lines, at) ?? readHeading(lines, at) ?? readRule(lines, at) ?? readTable(lines, at) ?? readNested(lines, at, depth);
}

function readNested(lines, at, depth) {
  return depth < MAX_DEPTH ? readQuote(lines, at, depth) ?? readList(lines, at, depth) : null;
}

// ---- text -----------------------------------------------------------------------------------------------------------

function readParagraph(lines, at, depth) {
  let end = at + 1;
  while (end < lines.length && !isBlank(lines[end]) && !interrupts(lines, end, depth)) end += 1;
  return { tree: element("p", parseInline(lines.slice(at, end).join("\n").trimEnd())), end };
}

/** Whether a block begins here although a paragraph stands before it: a year at the start of a line is no list. */
function interrupts(lines, at, depth) {
  const line = lines[at];
  if (openingFence(line) || heading(line) || isRule(line) || isTable(lines, at)) return true;
  if (depth >= MAX_DEPTH) return false;
  const marker = readMarker(line);
  return isQuote(line) || (marker !== null && marker.rest !== "" && (!marker.isOrdered || marker.number === 1));
}

const heading = (line) => /^ {0,3}(#{1,6})(?=[ \t]|$)/.exec(line);

function readHeading(lines, at) {
  const found = heading(lines[at]);
  if (found === null) return null;
  const text = ` ${lines[at].slice(found[0].length).trim()}`.replace(/[ \t]#+$/, "").trim();
  const tag = `h${Math.min(LAST_HEADING, FIRST_HEADING - 1 + found[1].length)}`;
  return { tree: element(tag, parseInline(text)), end: at + 1 };
}

const isRule = (line) => /^(?:-{3,}|\*{3,}|_{3,})$/.test(line.replace(/[ \t]+/g, ""));

const readRule = (lines, at) => (isRule(lines[at]) ? { tree: element("hr"), end: at + 1 } : null);

// ---- code -----------------------------------------------------------------------------------------------------------

/** {marker, language, indent}; `` ```like this``` `` on one line is no fence. */
function openingFence(line) {
  const found = /^(`{3,}|~{3,})[ \t]*([^\s`]*)/.exec(line.trimStart());
  if (found === null || (found[1][0] === "`" && line.trimStart().includes("`", found[1].length))) return null;
  return { marker: found[1], language: found[2], indent: indentOf(line) };
}

function readFence(lines, at) {
  const fence = openingFence(lines[at]);
  if (fence === null) return null;
  let end = at + 1;
  while (end < lines.length && !closes(fence, lines[end])) end += 1;
  const isOpen = end === lines.length;
  const code = lines.slice(at + 1, end).map((line) => stripIndent(line, fence.indent));
  // While it is written, the last line may be empty, or the beginning of the closing fence.
  if (isOpen && code.length > 0 && fence.marker.startsWith(code.at(-1).trim())) code.pop();
  return { tree: codeBlock(code.join("\n"), fence.language), end: isOpen ? end : end + 1 };
}

function closes({ marker }, line) {
  const text = line.trim();
  return text.length >= marker.length && text.startsWith(marker) && text === marker[0].repeat(text.length);
}

function codeBlock(code, language) {
  const copy = element("button", ["Copy"], { type: "button", class: "quiet copy-code", "aria-label": "Copy this code" });
  const head = element("div", [element("span", [language || "code"]), copy], { class: "code-head" });
  const label = `Code${language ? `, ${language}` : ""}`;
  const pre = element("pre", [element("code", code ? [code] : [])], { tabindex: "0", role: "region", "aria-label": label });
  return element("div", [head, pre], { class: "code" });
}

// ---- quotes and lists -----------------------------------------------------------------------------------------------

const isQuote = (line) => /^ {0,3}>/.test(line);

function readQuote(lines, at, depth) {
  let end = at;
  while (end < lines.length && isQuote(lines[end])) end += 1;
  if (end === at) return null;
  const inner = lines.slice(at, end).map((line) => line.replace(/^ {0,3}> ?/, ""));
  return { tree: element("blockquote", treesOf(inner, depth)), end };
}

/** {isOrdered, number, indent, content, rest}: `content` is the column where the item's text begins. */
function readMarker(line) {
  const text = line.trimStart();
  const found = /^(?:[-*+]|(\d{1,9})[.)])(?=[ \t]|$)/.exec(text);
  if (found === null) return null;
  const indent = indentOf(line);
  const rest = text.slice(found[0].length);
  const gap = indentOf(rest);
  const width = found[0].length + (gap > 4 || isBlank(rest) ? 1 : gap);
  return { isOrdered: found[1] !== undefined, number: Number(found[1] ?? 0), indent, content: indent + width, rest: rest.trimStart() };
}

function readList(lines, at, depth) {
  const first = readMarker(lines[at]);
  if (first === null) return null;
  const items = [];
  let isLoose = false;
  let end = at;
  for (let next = at; next !== null; ) {
    const item = readItem(lines, next, depth);
    items.push(element("li", item.trees));
    end = item.end;
    next = nextItem(lines, end, first);
    isLoose ||= next > end || item.trees.filter(({ tag }) => tag === "p").length > 1;
  }
  const attributes = isLoose ? { class: "loose" } : {};
  if (first.isOrdered && first.number !== 1) attributes.start = String(first.number);
  return { tree: element(first.isOrdered ? "ol" : "ul", items, attributes), end };
}

/** The line of the list's next item, if the list goes on. */
function nextItem(lines, end, first) {
  const line = nextText(lines, end);
  if (line === lines.length || isRule(lines[line])) return null;
  const marker = readMarker(lines[line]);
  return marker?.isOrdered === first.isOrdered && marker.indent < first.indent + NEST_COLUMNS ? line : null;
}

function readItem(lines, at, depth) {
  const marker = readMarker(lines[at]);
  const inner = [marker.rest];
  let columns = null; // how far the item's further lines are indented: all are moved by as much
  let hasFence = openingFence(marker.rest) !== null;
  let end = at + 1;
  while (end < lines.length) {
    const text = nextText(lines, end);
    if (text === lines.length) break;
    const line = lines[text];
    const isInside = indentOf(line) >= marker.indent + NEST_COLUMNS;
    const isLazy = text === end && !hasFence && readMarker(line) === null && !interrupts(lines, text, depth);
    if (!isInside && !isLazy) break;
    for (; end < text; end++) inner.push("");
    columns ??= isInside ? Math.min(indentOf(line), marker.content) : null;
    inner.push(stripIndent(line, columns ?? 0));
    hasFence ||= openingFence(line) !== null;
    end = text + 1;
  }
  return { trees: treesOf(inner, depth), end };
}

const treesOf = (lines, depth) => parseBlocks(lines, depth + 1).map(({ tree }) => tree);

// ---- tables ---------------------------------------------------------------------------------------------------------

function isTable(lines, at) {
  if (at + 1 >= lines.length || !lines[at].includes("|")) return false;
  const line = lines[at + 1];
  if (!/^[ \t|:-]+$/.test(line) || !line.includes("-")) return false;
  const [wanted, found] = [splitCells(lines[at]).length, splitCells(line).length];
  const isBeingWritten = at + 2 === lines.length && lines[at].trimStart().startsWith("|") && line.trimStart().startsWith("|");
  return found === wanted || (isBeingWritten && found < wanted);
}

function readTable(lines, at) {
  if (!isTable(lines, at)) return null;
  const sides = splitCells(lines[at + 1]).map(sideOf);
  let end = at + 2;
  while (end < lines.length && lines[end].includes("|")) end += 1;
  const head = element("thead", [tableRow(lines[at], "th", sides)]);
  const rows = lines.slice(at + 2, end).map((line) => tableRow(line, "td", sides));
  const table = element("table", rows.length > 0 ? [head, element("tbody", rows)] : [head]);
  return { tree: element("div", [table], { class: "table", tabindex: "0", role: "region", "aria-label": "Table" }), end };
}

function tableRow(line, tag, sides) {
  const cells = splitCells(line).slice(0, tag === "td" ? sides.length : undefined);
  return element("tr", cells.map((cell, index) => element(tag, parseInline(cell), sides[index] ? { class: sides[index] } : {})));
}

function sideOf(cell) {
  if (!cell.endsWith(":")) return "";
  return cell.startsWith(":") ? "centre" : "right";
}

/** At each bar that is neither escaped nor in code. */
function splitCells(line) {
  const cells = [];
  let cell = "";
  let inCode = false;
  const text = line.trim();
  for (let i = text.startsWith("|") ? 1 : 0; i < text.length; i++) {
    const char = text[i];
    if (char === "\\" && text[i + 1] === "|") {
      cell += "|";
      i += 1;
    } else if (char === "|" && !inCode) {
      cells.push(cell.trim());
      cell = "";
    } else {
      if (char === "`") inCode = !inCode;
      cell += char;
    }
  }
  if (cell.trim() || !text.endsWith("|")) cells.push(cell.trim());
  return cells;
}

// ---- lines ----------------------------------------------------------------------------------------------------------

const isBlank = (line) => line.trim() === "";

/** The first line with text from here on, or the number of lines. */
function nextText(lines, at) {
  let next = at;
  while (next < lines.length && isBlank(lines[next])) next += 1;
  return next;
}

const TAB = 4;

/** In columns. */
function indentOf(line) {
  const space = line.slice(0, line.length - line.trimStart().length);
  return space.length + (TAB - 1) * (space.split("\t").length - 1);
}

/** Takes away so many columns, if there are as many. */
function stripIndent(line, columns) {
  let [at, left] = [0, columns];
  while (left > 0 && (line[at] === " " || line[at] === "\t")) {
    left -= line[at] === "\t" ? TAB : 1;
    at += 1;
  }
  return line.slice(at);
}
