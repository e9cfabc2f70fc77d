// One turn of the conversation as it is seen: its text, the facts under an answer, and what can be done with it.

import { MarkdownView } from "./markdown.js";
import { patch } from "./patch.js";

const ACTIONS = {
  user: [["copy", "Copy", "Copy your message"], ["edit", "Edit", "Edit your message and send it again"]],
  assistant: [["copy", "Copy", "Copy this answer"], ["regenerate", "Regenerate", "Let the model answer again"]],
};

export class Turn {
  /** `onAction(name, turn, button)` is told which button was pressed. */
  constructor({ role, content = "", facts = "" }, onAction) {
    this.role = role;
    this.content = content;
    this.facts = facts;
    this.element = document.createElement("article");
    this.element.className = `message ${role}`;
    this.element.setAttribute("aria-label", role === "user" ? "You" : "Model");
    this.body = document.createElement("div");
    this.body.className = "body";
    this.markdown = role === "assistant" ? new MarkdownView(this.body) : null;
    this.factsLine = document.createElement("p");
    this.factsLine.className = "facts";
    const foot = document.createElement("footer");
    foot.append(this.factsLine, this.#actions(onAction));
    this.element.append(this.body, foot);
    this.#draw();
  }

  /** Takes the newest state; it is drawn with the next picture of the screen, or `now`. */
  show(content, facts, { now = false, afterwards = () => {} } = {}) {
    this.content = content;
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
    this.element.classList.toggle("live", isLive);
    this.element.setAttribute("aria-busy", String(isLive));
  }

  #draw() {
    if (this.markdown) this.markdown.show(this.content);
    else patch(this.body, [this.content]);
    patch(this.factsLine, this.facts ? [this.facts] : []);
  }

  #actions(onAction) {
    const bar = document.createElement("div");
    bar.className = "actions";
    for (const [name, label, description] of ACTIONS[this.role]) {
      const button = document.createElement("button");
      button.type = "button";
      button.className = `quiet ${name}`;
      button.textContent = label;
      button.setAttribute("aria-label", description);
      button.title = description;
      button.addEventListener("click", () => onAction(name, this, button));
      bar.append(button);
    }
    return bar;
  }
}
