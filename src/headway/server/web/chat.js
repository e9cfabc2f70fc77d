// The chat: one conversation, streamed, with the times a reader feels under each answer.

import { call, getModel, streamError } from "./api.js";
import { ms, plural } from "./format.js";
import { render } from "./markdown.js";
import { readEvents } from "./sse.js";

const $ = (id) => document.getElementById(id);

const IDEAS = [
  "Explain continuous batching to a bus driver.",
  "Write a short poem about a queue that never stands still.",
  "What is a KV cache, in three sentences?",
];
const ENDINGS = { length: "stopped at max tokens", stop: "", abort: "aborted", content_filter: "filtered" };

export class Chat {
  /** `onRequest(id)` is told the id of each request as soon as it is known. */
  constructor(onRequest) {
    this.onRequest = onRequest;
    this.history = [];
    this.abort = null;
    $("ask").addEventListener("submit", (event) => {
      event.preventDefault();
      this.#ask();
    });
    $("prompt").addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.#ask();
    });
    $("stop").addEventListener("click", () => this.abort?.abort());
    $("new-chat").addEventListener("click", () => this.#reset());
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape") this.abort?.abort();
    });
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

  #reset() {
    this.abort?.abort();
    this.history = [];
    $("messages").replaceChildren($("welcome"));
    $("welcome").hidden = false;
    $("prompt").focus();
  }

  async #ask() {
    const text = $("prompt").value.trim();
    if (!text || this.abort) return;
    const history = this.history;
    $("welcome").hidden = true;
    $("prompt").value = "";
    history.push({ role: "user", content: text });
    addMessage("user").body.textContent = text;
    const answer = addMessage("assistant");
    this.#setBusy(new AbortController());
    try {
      const content = await this.#stream(answer);
      if (content) history.push({ role: "assistant", content });
    } catch (error) {
      answer.fail(error.message);
      history.pop(); // so that the next try does not carry a question without an answer
    } finally {
      answer.element.classList.remove("live");
      this.#setBusy(null);
    }
  }

  #setBusy(abort) {
    const hadFocus = document.activeElement;
    this.abort = abort;
    $("send").hidden = abort !== null;
    $("stop").hidden = abort === null;
    if (hadFocus === $("send")) $("stop").focus();
    else if (hadFocus === $("stop")) $("prompt").focus();
    $("chat-status").textContent = abort ? "The model is answering." : "The answer is complete.";
  }

  /** Streams one answer and returns its text; an answer that is stopped is an answer all the same. */
  async #stream(answer) {
    const progress = new Progress();
    const { signal } = this.abort;
    answer.element.classList.add("live");
    answer.show(progress);
    try {
      const response = await call("/v1/chat/completions", { body: { ...(await this.#request()), stream: true }, signal });
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        const error = streamError(chunk);
        if (error) throw error;
        if (progress.firstAt === null) this.onRequest(chunk.id);
        progress.take(chunk);
        answer.show(progress);
      }
    } catch (error) {
      if (!signal.aborted) {
        if (error.name === "TypeError") throw new Error("The connection was lost.");
        throw error;
      }
      progress.ending = "stopped by you";
    }
    answer.show(progress, true);
    return progress.text;
  }

  async #request() {
    const system = $("system").value.trim();
    return {
      model: await getModel(),
      messages: [...(system ? [{ role: "system", content: system }] : []), ...this.history],
      stream_options: { include_usage: true },
      ...number("temperature", "temperature"),
      ...number("top_p", "top-p"),
      ...number("max_tokens", "max-tokens"),
    };
  }
}

/** An empty field leaves the choice to the server. */
function number(name, id) {
  const value = $(id).valueAsNumber;
  return Number.isNaN(value) ? {} : { [name]: value };
}

/** What has come of one answer, and when. */
class Progress {
  constructor() {
    this.text = "";
    this.tokens = 0;
    this.cached = 0;
    this.ending = "";
    this.askedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content ?? "";
    if (piece) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.text += piece;
      this.tokens += 1;
    }
    if (choice?.finish_reason) this.ending = ENDINGS[choice.finish_reason] ?? choice.finish_reason;
    if (chunk.usage) {
      this.tokens = chunk.usage.completion_tokens;
      this.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }

  facts() {
    if (this.firstAt === null) return [this.ending || "waiting for the first token …"];
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const facts = [`first token ${ms(this.firstAt - this.askedAt)}`];
    if (seconds > 0 && this.tokens > 1) facts.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(plural(this.tokens, "token"));
    if (this.cached > 0) facts.push(`${plural(this.cached, "prompt token")} from the cache`);
    if (this.ending) facts.push(this.ending);
    return facts;
  }
}

function addMessage(role) {
  const element = document.createElement("article");
  element.className = `message ${role}`;
  element.setAttribute("aria-label", role === "user" ? "You" : "Model");
  const body = document.createElement("div");
  body.className = "body";
  element.append(body);
  const facts = document.createElement("p");
  if (role === "assistant") {
    facts.className = "facts";
    element.append(facts);
  }
  const list = $("messages");
  list.append(element);
  list.scrollTop = list.scrollHeight;
  let wanted = null;
  const draw = () => {
    const isAtEnd = list.scrollHeight - list.scrollTop - list.clientHeight < 60;
    render(body, wanted.text);
    facts.textContent = wanted.facts().join(" · ");
    wanted = null;
    if (isAtEnd) list.scrollTop = list.scrollHeight;
  };
  return {
    element,
    body,
    /** Tokens may come faster than the screen is drawn; only the last state counts. */
    show(progress, now = false) {
      if (wanted === null && !now) requestAnimationFrame(() => wanted && draw());
      wanted = progress;
      if (now) draw();
    },
    fail(text) {
      const error = document.createElement("p");
      error.className = "error";
      error.setAttribute("role", "alert");
      error.textContent = text;
      element.append(error);
      facts.remove();
      list.scrollTop = list.scrollHeight;
    },
  };
}
