// JSON as models write it: laid out while it comes, and read when it is whole.

const INDENT = "  ";
const DEEPEST = 24; // of what is set in: a text of brackets alone would become very wide
const CLOSING = new Map([["{", "}"], ["[", "]"]]);

/** {value}, or {problem} in the browser's words. */
export function readJson(text) {
  try {
    return { value: JSON.parse(text) };
  } catch (error) {
    return { problem: error.message.replace(/^JSON\.parse: /, "") };
  }
}

export const isObject = (value) => typeof value === "object" && value !== null && !Array.isArray(value);

/** Whether a text is all of a JSON object or list. */
export function isJsonText(text) {
  return /^\s*[[{]/.test(text) && readJson(text).problem === undefined;
}

/**
 * One field per line. Only space between the parts changes: numbers and strings stay as they were written, a beginning
 * is laid out as far as it goes, and what is no JSON is still all there.
 */
export function layOut(text) {
  const parts = text.match(/"(?:[^"\\]|\\[\s\S])*(?:"|\\?$)|[{}[\],:]|[^\s"{}[\],:]+/g) ?? [];
  let depth = 0;
  const newLine = () => `\n${INDENT.repeat(Math.min(Math.max(0, depth), DEEPEST))}`;
  return parts.map((part, i) => {
    const [before, after] = [parts[i - 1], parts[i + 1]];
    if (part === "," || CLOSING.has(part)) {
      if (part !== ",") depth += 1;
      return after === undefined || after === CLOSING.get(part) ? part : part + newLine();
    }
    if (part === "}" || part === "]") {
      depth -= 1;
      return CLOSING.get(before) === part ? part : newLine() + part;
    }
    if (part === ":") return ": ";
    return isWord(before) ? ` ${part}` : part;
  }).join("");
}

const isWord = (part) => part !== undefined && !/^[{}[\],:]$/.test(part);
