// The parts of an answer that are not prose: JSON, calls of tools, their results, thoughts. Trees for patch.js.

import { isObject, layOut, readJson } from "./json_text.js";
import { element, patch } from "./patch.js";

/** An answer in JSON. */
export function jsonTree(text, { isLive }) {
  return box(["JSON", mark(text, { isLive })], layOut(text), { copies: "Copy this JSON" });
}

/** A call that the model wants: {name, arguments}. */
export function callTree({ name, arguments: text }, { isLive }) {
  const head = ["Calls ", element("b", [name]), " with"];
  return box(isCallable(text) || isLive ? head : [...head, mark(text, { isLive })], layOut(text || "{}"), {
    kind: "call",
    copies: `Copy the arguments of ${name}`,
  });
}

/** What a tool gave back: {name, content}. */
export function resultTree({ name, content }) {
  const isJson = readJson(content).problem === undefined;
  return box([element("b", [name]), " returned"], isJson ? layOut(content) : content, { kind: "result", copies: `Copy the result of ${name}` });
}

/** Whether a call is whole: only then it can be answered, and told to the server again. */
export const isCallable = (text) => isObject(readJson(text || "{}").value);

function box(head, text, { kind = "json", copies }) {
  const copy = element("button", ["Copy"], { type: "button", class: "quiet copy-code", "aria-label": copies });
  const code = element("pre", [element("code", [text])], { tabindex: "0" });
  return element("div", [element("div", [element("span", head), copy], { class: "code-head" }), code], { class: `code ${kind}` });
}

function mark(text, { isLive }) {
  if (isLive) return element("span", [" …"], { class: "mark" });
  const { problem } = readJson(text);
  if (problem === undefined) return element("span", [" ✓ parsed"], { class: "mark good" });
  return element("span", [` ✗ does not parse: ${problem}`], { class: "mark error" });
}

/** A section that is open while thoughts are all there is, and closes when more comes, unless the reader has chosen. */
export class Thoughts {
  constructor() {
    this.element = document.createElement("details");
    this.element.className = "thoughts";
    this.element.hidden = true;
    this.title = document.createElement("summary");
    this.text = document.createElement("div");
    this.element.append(this.title, this.text);
    this.isChosen = false;
    this.title.addEventListener("click", () => (this.isChosen = true));
  }

  show(text, { isLive, isAll }) {
    this.element.hidden = text === "";
    patch(this.title, [isLive && isAll ? "Thinking …" : "Thoughts"]);
    patch(this.text, [text.trim()]);
    if (!this.isChosen) this.element.open = isAll;
  }
}

/** Boxes for the results of calls, in which a person plays the tool. */
export class ResultForm {
  /** `onSend([{id, name, content}])`. */
  constructor(calls, onSend) {
    this.calls = calls;
    this.onSend = onSend;
    this.element = document.createElement("form");
    this.element.className = "results";
    this.boxes = calls.map((call) => this.#box(calls.length === 1 ? call.name : `${call.name} ${call.arguments}`));
    const send = document.createElement("button");
    send.textContent = calls.length === 1 ? "Send result" : "Send results";
    this.element.append(send);
    this.element.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send();
    });
  }

  #box(what) {
    const label = document.createElement("label");
    const box = document.createElement("textarea");
    box.rows = 1;
    box.placeholder = "text or JSON (Enter sends)";
    box.spellcheck = false;
    box.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#send();
    });
    label.append(`Result of ${what}`, box);
    this.element.append(label);
    return box;
  }

  #send() {
    const empty = this.boxes.find((box) => box.value.trim() === "");
    if (empty) empty.focus();
    else this.onSend(this.calls.map(({ id, name }, i) => ({ id, name, content: this.boxes[i].value.trim() })));
  }
}
