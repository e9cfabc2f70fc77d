// The little Markdown that models write most: fenced code, `code`, **bold**. Builds nodes, never HTML from text.

/** Fills `element` with the text. */
export function render(element, text) {
  const parts = text.split(/^```[^\n]*\n?/m);
  element.replaceChildren(...parts.flatMap((part, index) => (index % 2 === 1 ? [codeBlock(part)] : inline(part))));
}

function codeBlock(text) {
  const pre = document.createElement("pre");
  const code = document.createElement("code");
  code.textContent = text.replace(/\n$/, "");
  pre.append(code);
  return pre;
}

function inline(text) {
  return text.split(/(`[^`\n]+`|\*\*[^*\n]+\*\*)/).map((part) => {
    if (part.length > 2 && part.startsWith("`") && part.endsWith("`")) return tagged("code", part.slice(1, -1));
    if (part.length > 4 && part.startsWith("**") && part.endsWith("**")) return tagged("b", part.slice(2, -2));
    return document.createTextNode(part);
  });
}

function tagged(tag, text) {
  const element = document.createElement(tag);
  element.textContent = text;
  return element;
}
