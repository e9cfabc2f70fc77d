// Keeps a connection to /live while the page is visible, and says what came of it.

import { call } from "./api.js";
import { readEvents } from "./sse.js";

const FIRST_RETRY_MS = 500;
const LAST_RETRY_MS = 8000;

export class LiveConnection {
  /** `onHello(info)`, `onFrame(frame)`, `onTrouble(text)`: the last when there is no connection, with the reason. */
  constructor({ onHello, onFrame, onTrouble }) {
    this.handlers = { hello: onHello, frame: onFrame };
    this.onTrouble = onTrouble;
    this.retryMs = FIRST_RETRY_MS;
    this.abort = null;
    this.timer = null;
    document.addEventListener("visibilitychange", () => this.restart());
  }

  /** Connects anew: at the beginning, with another key, when the page is seen again. */
  restart() {
    this.abort?.abort();
    clearTimeout(this.timer);
    this.retryMs = FIRST_RETRY_MS;
    if (!document.hidden) this.#connect();
  }

  async #connect() {
    const abort = (this.abort = new AbortController());
    let trouble = "The connection was closed.";
    try {
      const response = await call("/live", { signal: abort.signal });
      for await (const { event, data } of readEvents(response)) {
        this.retryMs = FIRST_RETRY_MS;
        this.handlers[event]?.(JSON.parse(data));
      }
    } catch (error) {
      if (error.status || error.message.startsWith("The server")) trouble = error.message;
    }
    if (abort.signal.aborted) return;
    this.onTrouble(trouble);
    this.timer = setTimeout(() => this.#connect(), this.retryMs);
    this.retryMs = Math.min(this.retryMs * 2, LAST_RETRY_MS);
  }
}
