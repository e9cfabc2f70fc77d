// "Send load": forty mixed requests, to see continuous batching at work.
//
// A browser opens few connections to one server, so a call carries several prompts: each of them is a request of its own
// to the engine. One connection is left to the live view and one to the chat.

import { call, getModel, streamError } from "./api.js";
import { readEvents } from "./sse.js";

const $ = (id) => document.getElementById(id);

const MAX_CALLS = 4;
const STAGGER_MS = 450;
/** [prompts, most tokens of each answer]: forty requests; long calls first, so that short ones come and go beside them. */
const CALLS = [[5, 300], [4, 120], [3, 8], [5, 64], [4, 24], [2, 220], [5, 48], [4, 160], [3, 12], [5, 96]];
export const NUM_REQUESTS = CALLS.reduce((sum, [prompts]) => sum + prompts, 0);

const TOPICS = [
  "buses that arrive in pairs", "the water clock", "why bread rises", "migrating birds", "the history of glass",
  "tides", "how a lock and key fit", "the first telegraph", "paper folding", "volcanic islands", "chess endings",
  "the smell of rain", "cathedral bells", "desert plants", "the metric system", "night trains",
];
const PASSAGE =
  "A line runs well when the gap between two vehicles stays even. When one is held up, more people wait at the next stop, " +
  "and it is held up longer; the one behind finds empty stops and catches up. Planners keep a little slack, watch the " +
  "gaps instead of the timetable, and let nobody wait for a full bus to empty before the next may leave. ";

export class Load {
  /** `getInfo` tells what the engine said of itself, or null. */
  constructor(getInfo) {
    this.getInfo = getInfo;
    this.abort = null;
    $("load").addEventListener("click", () => this.#send());
    $("load-cancel").addEventListener("click", () => this.abort?.abort());
  }

  async #send() {
    if (this.abort) return;
    this.#setBusy(new AbortController());
    const tally = { done: 0, failed: 0, why: "" };
    try {
      await this.#sendAll(tally);
      this.#say(tally, this.abort.signal.aborted ? "cancelled" : "all sent");
    } catch (error) {
      $("load-status").textContent = error.message;
    } finally {
      this.#setBusy(null);
    }
  }

  async #sendAll(tally) {
    const { signal } = this.abort;
    const model = await getModel();
    const started = performance.now();
    const pending = CALLS.map(([prompts, maxTokens], index) => ({ prompts, maxTokens, index }));
    const worker = async () => {
      while (pending.length > 0 && !signal.aborted) {
        const job = pending.shift();
        await pause(started + job.index * STAGGER_MS - performance.now(), signal);
        await this.#sendOne(job, { model, signal, tally });
      }
    };
    this.#say(tally, "");
    await Promise.all(Array.from({ length: MAX_CALLS }, worker));
  }

  async #sendOne({ prompts, maxTokens, index }, { model, signal, tally }) {
    const longest = longestPrompt(this.getInfo());
    const body = {
      model,
      prompt: Array.from({ length: prompts }, (_, i) => makePrompt(index * 7 + i * 5, longest)),
      max_tokens: maxTokens,
      temperature: 0.8,
      ignore_eos: true,
      stream: true,
    };
    let done = 0;
    try {
      const response = await call("/v1/completions", { body, signal });
      for await (const { data } of readEvents(response)) {
        if (data === "[DONE]") break;
        const chunk = JSON.parse(data);
        const error = streamError(chunk);
        if (error) throw error;
        const ended = (chunk.choices ?? []).filter((choice) => choice.finish_reason).length;
        done += ended;
        tally.done += ended;
        if (ended) this.#say(tally, "");
      }
    } catch (error) {
      if (signal.aborted) return;
      tally.why = error.message;
    }
    tally.failed += prompts - done;
    if (done < prompts) this.#say(tally, "");
  }

  #setBusy(abort) {
    const hadFocus = document.activeElement;
    this.abort = abort;
    $("load").hidden = abort !== null;
    $("load-cancel").hidden = abort === null;
    if (hadFocus === $("load")) $("load-cancel").focus();
    else if (hadFocus === $("load-cancel")) $("load").focus();
  }

  #say({ done, failed, why }, ending) {
    const parts = [`${done} of ${NUM_REQUESTS} done`];
    if (failed) parts.push(`${failed} failed: ${why || "ended early"}`);
    if (ending === "cancelled") parts.push("cancelled");
    $("load-status").textContent = parts.join(" · ");
  }
}

/** Short for most, long for every third: a long one comes in chunks, which share their steps with the others. */
function makePrompt(seed, longest) {
  const topic = TOPICS[seed % TOPICS.length];
  if (seed % 3 !== 0) return `A short text about ${topic}:`;
  const passages = Math.max(1, Math.round((longest * (1 + (seed % 5))) / 5));
  return `${PASSAGE.repeat(passages)}\n\nIn the same manner, a text about ${topic}:`;
}

/** In passages, of about 75 tokens each: a second's work for a CPU, and something for a GPU to do. */
function longestPrompt(info) {
  const wanted = !info || info.device.startsWith("cpu") ? 4 : 24;
  const room = info ? Math.floor((info.max_model_len - 350) / 90) : wanted;
  return Math.max(1, Math.min(wanted, room));
}

function pause(milliseconds, signal) {
  return new Promise((resolve) => {
    const timer = setTimeout(resolve, Math.max(0, milliseconds));
    signal.addEventListener("abort", () => {
      clearTimeout(timer);
      resolve();
    }, { once: true });
  });
}
