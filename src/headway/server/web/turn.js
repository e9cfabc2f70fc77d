// One turn of the conversation as it is seen: its text, thoughts, calls and results, the facts under an answer, and what
// can be done with it. Questions come from the reader ("user") or are the results of the calls before ("tool").

import { callTree, isCallable, jsonTree, ResultForm, resultTree, Thoughts } from "./answer_parts.js";
import { isJsonText } from "./json_text.js";
import { MarkdownView } from "./markdown.js";
import { patch } from "./patch.js";

const NAMES = { user: "You", assistant: "Model", tool: "Result" };
const ACTIONS = {
  user: [["copy", "Copy", "Copy your message"], ["edit", "Edit", "Edit your message and send it again"]],
  assistant: [["copy", "Copy", "Copy this answer"], ["regenerate", "Regenerate", "Let the model answer again"]],
  tool: [],
};

export class Turn {
  /** `onAction(name, turn, button)` is told which button was pressed, `onResults(turn, results)` what calls gave. */
  constructor({ role, content = "", facts = "", thoughts = "", calls = [], results = [], isJson = false }, { onAction, onResults }) {
    this.role = role;
    this.content = content;
    this.facts = facts;
    this.thoughts = thoughts;
    this.calls = calls;
    this.results = results;
    this.isJson = isJson; // as it was asked for
    this.isLive = false;
    this.onResults = onResults;
    this.element = document.createElement("article");
    this.element.className = `message ${role}`;
    this.element.setAttribute("aria-label", NAMES[role]);
    this.body = part("div", "body");
    this.thoughtsView = new Thoughts();
    this.callsView = part("div", "calls");
    this.markdown = role === "assistant" ? new MarkdownView(this.body) : null;
    this.factsLine = part("p", "facts");
    const foot = document.createElement("footer");
    foot.append(this.factsLine, this.#actions(onAction));
    this.element.append(...(this.markdown ? [this.thoughtsView.element, this.body, this.callsView] : [this.body]), foot);
    this.#draw();
    this.end();
  }

  /** As it is stored. */
  get data() {
    const { role, content, facts, thoughts, calls, results, isJson } = this;
    return { role, content, facts, thoughts, calls, results, isJson };
  }

  get isEmpty() {
    return this.content === "" && this.thoughts === "" && this.calls.length === 0;
  }

  /** As the server is told. Calls that were cut off are left out: they cannot be read. */
  get messages() {
    if (this.role === "user") return [{ role: "user", content: this.content }];
    if (this.role === "tool") return this.results.map(({ id, content }) => ({ role: "tool", tool_call_id: id, content }));
    const calls = this.#callable.map(({ id, name, arguments: text }) => ({ id, type: "function", function: { name, arguments: text || "{}" } }));
    return [{
      role: "assistant",
      content: this.content,
      ...(this.thoughts ? { reasoning_content: this.thoughts } : {}),
      ...(calls.length > 0 ? { tool_calls: calls } : {}),
    }];
  }

  /** The answer in plain text, without what was thought. */
  get text() {
    return [this.content, ...this.calls.map(({ name, arguments: text }) => `${name}(${text})`)].filter(Boolean).join("\n");
  }

  /** The same as it is read aloud. */
  get spoken() {
    const calls = this.calls.map(({ name, arguments: text }) => `Calls ${name} with ${text}`);
    return [this.content && this.body.innerText, ...calls].filter(Boolean).join("\n");
  }

  /** Takes the newest state; it is drawn with the next picture of the screen, or `now`. */
  show({ text, thoughts, calls }, facts, { now = false, afterwards = () => {} } = {}) {
    this.content = text;
    this.thoughts = thoughts;
    this.calls = calls;
    this.facts = facts;
    const draw = () => {
      this.wanted = null;
      this.#draw();
      afterwards();
    };
    if (now) {
      cancelAnimationFrame(this.wanted);
      draw();
    } else {
      this.wanted ??= requestAnimationFrame(draw);
    }
  }

  setLive(isLive) {
    this.isLive = isLive;
    this.element.classList.toggle("live", isLive);
    this.element.setAttribute("aria-busy", String(isLive));
  }

  /** The answer is all there: results of its calls can be typed in. */
  end() {
    const calls = this.#callable;
    if (calls.length > 0) this.callsView.after(new ResultForm(calls, (results) => this.onResults(this, results)).element);
  }

  get #callable() {
    return this.calls.filter(({ arguments: text }) => isCallable(text));
  }

  #draw() {
    const { isLive } = this;
    if (this.role === "tool") patch(this.body, this.results.map(resultTree));
    else if (this.role === "user") patch(this.body, [this.content]);
    else {
      this.thoughtsView.show(this.thoughts, { isLive, isAll: this.content === "" && this.calls.length === 0 });
      if (this.content && (this.isJson || (!isLive && isJsonText(this.content)))) patch(this.body, [jsonTree(this.content, { isLive })]);
      else this.markdown.show(this.content);
      this.body.hidden = this.content === "" && this.calls.length > 0;
      patch(this.callsView, this.calls.map((call, i) => callTree(call, { isLive: isLive && i === this.calls.length - 1 })));
    }
    patch(this.factsLine, this.facts ? [this.facts] : []);
  }

  #actions(onAction) {
    const bar = part("div", "actions");
    for (const [name, label, description] of ACTIONS[this.role]) {
      const button = part("button", `quiet ${name}`);
      button.type = "button";
      button.textContent = label;
      button.setAttribute("aria-label", description);
      button.title = description;
      button.addEventListener("click", () => onAction(name, this, button));
      bar.append(button);
    }
    return bar;
  }
}

function part(tag, className) {
  const made = document.createElement(tag);
  made.className = className;
  return made;
}
