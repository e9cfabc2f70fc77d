// Makes an element's children what a tree says, and touches only what differs: text that is selected stays
// selected while more is written behind it.
//
// A tree is made of strings and of {tag, attributes, children}.

export const element = (tag, children = [], attributes = {}) => ({ tag, attributes, children });

/** From the child number `from` on. */
export function patch(parent, wanted, from = 0) {
  let child = parent.childNodes[from] ?? null;
  for (const tree of wanted) {
    const next = child?.nextSibling ?? null;
    if (child === null) parent.append(make(tree));
    else if (fits(child, tree)) update(child, tree);
    else child.replaceWith(make(tree));
    child = next;
  }
  while (child !== null) {
    const next = child.nextSibling;
    child.remove();
    child = next;
  }
}

function make(tree) {
  if (typeof tree === "string") return document.createTextNode(tree);
  const made = document.createElement(tree.tag);
  update(made, tree);
  return made;
}

function fits(node, tree) {
  if (typeof tree === "string") return node.nodeType === Node.TEXT_NODE;
  return node.nodeType === Node.ELEMENT_NODE && node.localName === tree.tag;
}

function update(node, tree) {
  if (typeof tree === "string") {
    updateText(node, tree);
    return;
  }
  for (const { name } of [...node.attributes]) {
    if (!(name in tree.attributes) && !name.startsWith("data-")) node.removeAttribute(name);
  }
  for (const [name, value] of Object.entries(tree.attributes)) {
    if (node.getAttribute(name) !== value) node.setAttribute(name, value);
  }
  patch(node, tree.children);
}

function updateText(node, text) {
  const old = node.data;
  if (old === text) return;
  let same = 0;
  if (text.startsWith(old)) same = old.length;
  else while (same < old.length && old[same] === text[same]) same += 1;
  node.replaceData(same, old.length - same, text.slice(same));
}
