// The chat: one conversation of questions and answers, in turn. A question without an answer does not stay in it: it goes
// back into the box, whatever kept the answer from coming. The results of calls are a question too.

import { AnswerFormat } from "./answer_format.js";
import { call, getModel, streamError } from "./api.js";
import { copyText } from "./clipboard.js";
import { Progress } from "./progress.js";
import { readEvents } from "./sse.js";
import { loadChat, saveChat } from "./stored_chat.js";
import { Turn } from "./turn.js";

const $ = (id) => document.getElementById(id);

const IDEAS = [
  "Explain continuous batching to a bus driver.",
  "Write a short poem about a queue that never stands still.",
  "What is a KV cache, in three sentences?",
];
const SETTINGS = ["temperature", "top-p", "max-tokens", "system"];
const NEAR_END_PX = 60;
const COPIED_MS = 1500;
const SPOKEN_CHARS = 600;

export class Chat {
  /** `onAsk()` when a question is sent, `onRequest(id)` when its id is known, `onEnd()` when there will be no more. */
  constructor({ onAsk, onRequest, onEnd }) {
    this.told = { onAsk, onRequest, onEnd };
    this.turns = []; // questions and answers, in turn
    this.running = null; // {abort, before, question, answer} while an answer is on its way
    this.isChanged = false; // since it was stored
    this.editing = null; // the number of the turn that the box's text replaces, with all that follows it
    this.laidAside = ""; // what was in the box before
    this.format = new AnswerFormat({ onChange: () => this.#changed() });
    this.#restore();
    this.#listen();
  }

  // ---- what the reader does -----------------------------------------------------------------------------------------

  #listen() {
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    $("stop").addEventListener("click", () => this.#stop());
    $("new-chat").addEventListener("click", () => this.#reset());
    $("edit-cancel").addEventListener("click", () => this.#cancelEdit());
    $("retry").addEventListener("click", () => this.retry());
    $("messages").addEventListener("click", (event) => {
      const button = event.target.closest(".copy-code");
      if (button) this.#copy(button.closest(".code").querySelector("code").textContent, button);
    });
    document.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      if (this.running) this.#stop();
      else if (this.editing !== null) this.#cancelEdit();
    });
    for (const id of ["prompt", ...SETTINGS]) $(id).addEventListener("input", () => this.#changed());
    addEventListener("pagehide", () => this.#save());
    document.addEventListener("visibilitychange", () => this.#save());
    $("ideas").append(...IDEAS.map((idea) => this.#ideaButton(idea)));
  }

  #ideaButton(idea) {
    const button = document.createElement("button");
    button.type = "button";
    button.textContent = idea;
    button.addEventListener("click", () => {
      $("prompt").value = idea;
      this.#ask();
    });
    return button;
  }

  #ask() {
    const text = $("prompt").value.trim();
    if (!text || this.running) return;
    const format = this.format.read({ isResult: false });
    if (!format) return;
    const { editing } = this;
    const base = this.turns.slice(0, editing ?? undefined);
    $("prompt").value = "";
    this.#setEditing(null);
    this.#answer(base, { role: "user", content: text }, {
      format,
      keepsPart: true,
      draft: (typed) => (typed.trim() ? `${text}\n\n${typed}` : text),
      giveBack: (hasPart) => this.#setEditing(hasPart ? base.length : editing),
      retry: () => {
        $("prompt").value ||= text;
        this.#ask();
      },
    });
  }

  #regenerate() {
    if (this.running || this.turns.length < 2) return;
    this.#answerAsBefore(this.turns.slice(0, -2), this.turns.at(-2).data, () => this.#regenerate());
  }

  #sendResults(turn, results) {
    if (this.running || this.turns.at(-1) !== turn) return;
    this.#setEditing(null);
    this.#answerAsBefore(this.turns, { role: "tool", results }, () => this.#sendResults(turn, results));
  }

  /** For questions that do not come from the box: if the answer fails, all is as before. */
  #answerAsBefore(base, question, retry) {
    const format = this.format.read({ isResult: question.role === "tool" });
    if (format) this.#answer(base, question, { format, keepsPart: false, draft: (typed) => typed, giveBack: () => {}, retry });
  }

  #stop() {
    this.running?.abort.abort();
  }

  #reset() {
    if (this.running) {
      this.#stop();
      this.running = null;
      this.told.onEnd();
    }
    this.#setTurns([]);
    this.#showFailure(null);
    this.#setEditing(null);
    $("prompt").value = "";
    this.#showBusy();
    this.#changed();
    this.#save();
    $("prompt").focus();
  }

  #act(action, turn, button) {
    if (action === "copy") this.#copy(turn.text, button);
    if (this.running) return;
    if (action === "regenerate") this.#regenerate();
    if (action === "edit") {
      if (this.editing === null) this.laidAside = $("prompt").value;
      $("prompt").value = turn.content;
      this.#setEditing(this.turns.indexOf(turn));
      $("prompt").focus();
    }
  }

  async #copy(text, button) {
    const isDone = await copyText(text);
    $("chat-status").textContent = isDone ? "Copied." : "The browser does not allow to copy.";
    button.dataset.copied = isDone ? "Copied" : "Not allowed";
    setTimeout(() => delete button.dataset.copied, COPIED_MS);
  }

  #cancelEdit() {
    $("prompt").value = this.laidAside;
    this.#setEditing(null);
    $("prompt").focus();
  }

  #setEditing(index) {
    this.editing = index;
    if (index === null) this.laidAside = "";
    $("editing").hidden = index === null;
    this.turns.forEach(({ element }, i) => element.classList.toggle("replaced", index !== null && i >= index));
  }

  // ---- one answer ---------------------------------------------------------------------------------------------------

  /**
   * `base` are the turns that stay. If nothing comes, those before come back, `draft` says what is in the box then, and
   * `giveBack` what it is for; if an error cuts the answer off, the same unless it `keepsPart`, and `retry` tries again.
   */
  async #answer(base, question, { format, keepsPart, draft, giveBack, retry }) {
    const before = this.turns;
    const asked = [...base, this.#newTurn(question)];
    const answer = this.#newTurn({ role: "assistant", isJson: format.isJson });
    const run = (this.running = { abort: new AbortController(), before, draft, answer });
    this.#changed();
    this.#showFailure(null);
    this.#setTurns([...asked, answer]);
    this.#scrollToEnd();
    this.#showBusy();
    this.told.onAsk();
    const progress = new Progress();
    let error = null;
    try {
      await this.#stream(answer, progress, { asked, format, signal: run.abort.signal });
    } catch (caught) {
      error = caught;
    }
    if (this.running !== run) return; // a new chat was begun
    this.running = null;
    answer.setLive(false);
    const isAtEnd = this.#isAtEnd();
    const hasPart = !progress.isEmpty && (!error || keepsPart);
    const isWhole = !error && !run.abort.signal.aborted;
    if (hasPart || isWhole) {
      answer.show(progress, progress.facts, { now: true });
      answer.end();
    } else this.#setTurns(before);
    if (error || !(hasPart || isWhole)) {
      $("prompt").value = draft($("prompt").value);
      giveBack(hasPart);
    }
    if (error) this.format.refuse(error);
    this.#showFailure(error && { text: error.message, retry });
    this.#showBusy();
    if (isAtEnd) this.#followToEnd();
    this.#speak(error, hasPart ? answer.spoken : "");
    this.told.onEnd();
    this.#save();
  }

  /** An answer that is stopped is an answer all the same: this returns as if it had ended. */
  async #stream(answer, progress, { asked, format, signal }) {
    answer.setLive(true);
    answer.show(progress, progress.running, { now: true });
    try {
      const response = await call("/v1/chat/completions", { body: await this.#request(asked, format), signal });
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") return;
        const chunk = JSON.parse(data);
        const error = streamError(chunk);
        if (error) throw error;
        if (progress.firstAt === null && chunk.id) this.told.onRequest(chunk.id);
        progress.take(chunk);
        this.#showProgress(answer, progress);
      }
      throw new Error("The connection was lost."); // every whole stream ends with [DONE]
    } catch (error) {
      if (signal.aborted) progress.ending = "stopped by you";
      else {
        progress.ending = "cut off";
        throw error.name === "TypeError" ? new Error("The connection was lost.") : error;
      }
    }
  }

  #showProgress(answer, progress) {
    const isAtEnd = this.#isAtEnd();
    answer.show(progress, progress.running, {
      afterwards: () => {
        if (isAtEnd) this.#followToEnd();
      },
    });
  }

  async #request(asked, { fields }) {
    const system = $("system").value.trim();
    return {
      model: await getModel(),
      messages: [
        ...(system ? [{ role: "system", content: system }] : []),
        ...asked.flatMap(({ messages }) => messages),
      ],
      stream: true,
      stream_options: { include_usage: true },
      ...number("temperature", "temperature"),
      ...number("top_p", "top-p"),
      ...number("max_tokens", "max-tokens"),
      ...fields,
    };
  }

  // ---- what is seen -------------------------------------------------------------------------------------------------

  #newTurn(turn) {
    return new Turn(turn, {
      onAction: (action, from, button) => this.#act(action, from, button),
      onResults: (from, results) => this.#sendResults(from, results),
    });
  }

  #setTurns(turns) {
    for (const { element } of this.turns) if (!turns.some((turn) => turn.element === element)) element.remove();
    this.turns = turns;
    const list = $("messages");
    for (const { element } of turns) if (element.parentElement !== list) $("failure").before(element);
    $("welcome").hidden = turns.length > 0;
  }

  #isAtEnd() {
    const { scrollHeight, scrollTop, clientHeight } = $("messages");
    return scrollHeight - scrollTop - clientHeight < NEAR_END_PX;
  }

  /** Unless it would carry away what is being selected. */
  #followToEnd() {
    const selection = getSelection();
    if (selection.isCollapsed || !$("messages").contains(selection.anchorNode)) this.#scrollToEnd();
  }

  #scrollToEnd() {
    $("messages").scrollTop = $("messages").scrollHeight;
  }

  #showBusy() {
    const hadFocus = document.activeElement;
    const isBusy = this.running !== null;
    $("send").hidden = isBusy;
    $("stop").hidden = !isBusy;
    $("messages").classList.toggle("busy", isBusy);
    if (hadFocus === $("send") && isBusy) $("stop").focus();
    else if (hadFocus === $("stop") && !isBusy) $("prompt").focus();
    if (isBusy) $("chat-status").textContent = "The model is answering.";
  }

  /** `failure`: {text, retry}, or null. */
  #showFailure(failure) {
    this.retry = failure?.retry ?? (() => {});
    $("failure").hidden = failure === null;
    $("failure-text").textContent = failure?.text ?? "";
    if (failure) this.#scrollToEnd();
  }

  /** For those who do not see the answer come. */
  #speak(error, text) {
    if (error) $("chat-status").textContent = ""; // the failure is an alert of its own
    else $("chat-status").textContent = text ? `Answer: ${text.slice(0, SPOKEN_CHARS)}` : "There is no answer.";
  }

  // ---- what stays ---------------------------------------------------------------------------------------------------

  #restore() {
    const { turns, draft, settings } = loadChat();
    this.#setTurns(turns.map((turn) => this.#newTurn(turn)));
    $("prompt").value = draft;
    for (const id of SETTINGS) if (id in settings) $(id).value = settings[id];
    this.format.restore(settings);
    this.#scrollToEnd();
  }

  #changed() {
    this.isChanged = true;
  }

  /**
   * An answer on its way is kept as far as it has come; a question without any goes back into the box. A page that only
   * looked leaves alone what another one may have stored meanwhile.
   */
  #save() {
    if (!this.isChanged) return;
    this.isChanged = this.running !== null;
    const { running } = this;
    const isOpen = running !== null && running.answer.isEmpty;
    const typed = $("prompt").value;
    saveChat({
      turns: (isOpen ? running.before : this.turns).map((turn) => turn.data),
      draft: isOpen ? running.draft(typed) : typed,
      settings: { ...Object.fromEntries(SETTINGS.map((id) => [id, $(id).value])), ...this.format.settings },
    });
  }
}

/** An empty field leaves the choice to the server. */
function number(name, id) {
  const value = $(id).valueAsNumber;
  return Number.isNaN(value) ? {} : { [name]: value };
}
