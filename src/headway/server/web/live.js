// Keeps a connection to /live while the page is visible, and says what came of it.

import { ApiError, call, SHUTTING_DOWN } from "./api.js";
import { readEvents } from "./sse.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 5000;
const SILENCE_MS = 5000; // the server says something every second

export class LiveConnection {
  /**
   * `onHello(info)`, `onFrame(frame)`, and `onTrouble({isRefused, isRestarting, text})` when there is no connection: the
   * server did not let the page in, restarts, or cannot be heard.
   */
  constructor({ onHello, onFrame, onTrouble }) {
    this.handlers = { hello: onHello, frame: onFrame };
    this.onTrouble = onTrouble;
    this.retryMs = FIRST_RETRY_MS;
    this.replica = 0;
    this.abort = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.restart());
    addEventListener("online", () => this.restart());
  }

  /** Connects anew: at the beginning, with another key, when the page is seen again. */
  restart() {
    this.abort?.abort();
    this.abort = null;
    clearTimeout(this.timer);
    this.retryMs = FIRST_RETRY_MS;
    if (!document.hidden) this.#connect();
  }

  /** Looks at another replica. */
  choose(replica) {
    this.replica = replica;
    this.restart();
  }

  async #connect() {
    const abort = (this.abort = new AbortController());
    let trouble = { isRefused: false, text: "The connection was closed." };
    let silence = null;
    const listen = () => {
      clearTimeout(silence);
      silence = setTimeout(() => {
        trouble = { isRefused: false, text: `The server has said nothing for ${SILENCE_MS / 1000} s.` };
        abort.abort();
      }, SILENCE_MS);
    };
    try {
      listen();
      const response = await call(this.replica ? `/live?replica=${this.replica}` : "/live", { signal: abort.signal });
      for await (const { event, data } of readEvents(response)) {
        listen();
        this.retryMs = FIRST_RETRY_MS;
        this.handlers[event]?.(JSON.parse(data));
      }
    } catch (error) {
      if (error instanceof ApiError) {
        const isRefused = error.status === 401 || error.status === 403;
        trouble = { isRefused, isRestarting: error.code === SHUTTING_DOWN, text: error.message };
        if (error.status === 404) this.replica = 0; // the server has fewer than it had
      } else if (error.name !== "AbortError" && error.name !== "TypeError") console.error(error);
    }
    clearTimeout(silence);
    if (this.abort !== abort) return;
    this.onTrouble(trouble);
    this.timer = setTimeout(() => this.#connect(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, LAST_RETRY_MS);
  }
}
