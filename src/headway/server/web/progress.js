// What has come of one answer, and when: the times a reader feels.

import { ms, plural } from "./format.js";

const ENDINGS = { length: "stopped at max tokens", stop: "", tool_calls: "", abort: "aborted", content_filter: "filtered" };

export class Progress {
  constructor() {
    this.text = "";
    this.thoughts = "";
    this.calls = []; // [{id, name, arguments}]
    this.tokens = 0;
    this.cached = 0;
    this.ending = "";
    this.askedAt = performance.now();
    this.firstAt = null;
    this.lastAt = null;
  }

  take(chunk) {
    const choice = chunk.choices?.[0];
    if (this.#takeDelta(choice?.delta ?? {})) {
      this.lastAt = performance.now();
      this.firstAt ??= this.lastAt;
      this.tokens += 1;
    }
    if (choice?.finish_reason) this.ending = ENDINGS[choice.finish_reason] ?? choice.finish_reason;
    if (chunk.usage) {
      this.tokens = chunk.usage.completion_tokens;
      this.cached = chunk.usage.prompt_tokens_details?.cached_tokens ?? 0;
    }
  }

  /** Whether there was something in it. */
  #takeDelta({ content, reasoning_content: thought, tool_calls: calls }) {
    this.text += content ?? "";
    this.thoughts += thought ?? "";
    for (const { index, id, function: piece } of calls ?? []) {
      const call = (this.calls[index] ??= { id: "", name: "", arguments: "" });
      call.id ||= id ?? "";
      call.name ||= piece?.name ?? "";
      call.arguments += piece?.arguments ?? "";
    }
    return Boolean(content || thought || calls?.length);
  }

  get isEmpty() {
    return this.firstAt === null;
  }

  /** While the answer is on its way. */
  get running() {
    return this.firstAt === null ? "waiting for the first token …" : this.facts;
  }

  get facts() {
    if (this.firstAt === null) return this.ending || "the model had nothing to say";
    const seconds = (this.lastAt - this.firstAt) / 1000;
    const facts = [`first token ${ms(this.firstAt - this.askedAt)}`];
    if (seconds > 0 && this.tokens > 1) facts.push(`${((this.tokens - 1) / seconds).toFixed(1)} tokens/s`);
    facts.push(plural(this.tokens, "token"));
    if (this.cached > 0) facts.push(`${plural(this.cached, "prompt token")} from the cache`);
    if (this.ending) facts.push(this.ending);
    return facts.join(" · ");
  }
}
