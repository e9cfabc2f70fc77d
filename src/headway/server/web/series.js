// Frames, several a second → one point a second, with rates from counters.

import { SECONDS } from "./charts.js";

const RATE_WINDOW_S = 3;
const COUNTERS = {
  steps: "num_steps",
  prompt: "prompt_tokens",
  output: "generation_tokens",
  busy: "device_busy_s",
  waited: "host_wait_s",
  read: "read_s",
  computed: "compute_s",
  tokens: "num_step_tokens",
  padded: "num_padding_tokens",
  nvmlBusy: "nvml_busy_s",
  nvml: "nvml_s",
};

export class Series {
  constructor() {
    this.points = [];
    this.recent = []; // [{at, and each of COUNTERS}], a little more than the window
    this.pointAt = -Infinity;
  }

  /** Takes in a frame's numbers; true if a point was added. */
  add(at, numbers) {
    const mark = { at };
    for (const [key, name] of Object.entries(COUNTERS)) mark[key] = numbers[name];
    const last = this.recent.at(-1);
    if (last && (at < last.at || mark.output < last.output)) this.recent = []; // another server process
    this.recent.push(mark);
    while (this.recent.length > 2 && this.recent[1].at <= at - RATE_WINDOW_S) this.recent.shift();
    if (at >= this.pointAt && at < this.pointAt + 1) return false;
    this.#fillGap(at);
    this.pointAt = at;
    this.points.push({
      output: this.rate("output"),
      prompt: this.rate("prompt"),
      running: numbers.num_running,
      waiting: numbers.num_waiting,
      ttft: numbers.ttft_p50_ms,
      p50: numbers.itl_p50_ms,
      p99: numbers.itl_p99_ms,
      ...this.shares(),
    });
    this.points.splice(0, this.points.length - SECONDS);
    return true;
  }

  /** Nothing is known of now: the lines end, and what comes later is not compared with what was. */
  lose() {
    this.recent = [];
    if (this.points.length > 0) this.points.push({});
  }

  /** Of a counter, per second, over the last few seconds. */
  rate(key) {
    const [first, last] = [this.recent[0], this.recent.at(-1)];
    if (!last) return null;
    return last.at > first.at ? (last[key] - first[key]) / (last.at - first.at) : 0;
  }

  /** How well steps use the device, over the last few seconds; null where nothing is known, as without its ceilings. */
  shares() {
    const [first, last] = [this.recent[0], this.recent.at(-1)];
    const grown = (key) => (last ? last[key] - first[key] : 0);
    const share = (part, ...wholes) => {
      const whole = wholes.reduce((sum, key) => sum + grown(key), 0);
      return whole > 0 ? grown(part) / whole : null;
    };
    const isMeasured = grown("read") > 0;
    return {
      bandwidth: isMeasured ? share("read", "busy") : null,
      compute: isMeasured ? share("computed", "busy") : null,
      padding: share("padded", "tokens", "padded"),
      host: share("waited", "waited", "busy"),
      nvml: share("nvmlBusy", "nvml"),
    };
  }

  /** Seconds without a sample are empty points. */
  #fillGap(at) {
    const missed = Math.min(SECONDS, Math.floor(at - this.pointAt) - 1);
    if (this.points.length > 0) for (let i = 0; i < missed; i++) this.points.push({});
  }
}
