// What has come of one answer, and when: the times a reader feels.

import { ms, plural } from "./format.js";

const ENDINGS = { length: "stopped at max tokens", stop: "", abort: "aborted", content_filter: "filtered" };

export class Progress {
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
