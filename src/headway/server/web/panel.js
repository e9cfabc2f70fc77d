// The right half of the page: what the frames say, drawn.

import { BlockMap } from "./blocks.js";
import { forgetColours } from "./canvas.js";
import { Chart } from "./charts.js";
import { count, ms, msPair, percent, plural, pricePair, rate } from "./format.js";
import { Lanes } from "./lanes.js";
import { Replicas } from "./replicas.js";
import { Restart } from "./restart.js";
import { Series } from "./series.js";

const $ = (id) => document.getElementById(id);
const SPOKEN_EVERY_MS = 5000;

export class BatchPanel {
  /** `onChoose(place)`: another replica is to be shown. */
  constructor({ onChoose }) {
    this.info = null;
    this.restart = new Restart();
    this.replicas = new Replicas($("replicas"), onChoose);
    this.lanes = new Lanes($("lanes"));
    this.blocks = new BlockMap($("blocks"));
    this.series = new Series();
    this.charts = [
      chart("throughput", [["output", "out"], ["prompt", "in"]], (v) => (v == null ? "–" : `${rate(v)}/s`)),
      chart("requests", [["running", "running"], ["waiting", "waiting"]], count),
      chart("ttft", [["ttft", "P50"]], ms),
      chart("itl", [["p50", "P50"], ["p99", "P99"]], ms),
      chart("use", [["bandwidth", "bandwidth"], ["compute", "compute"]], percent),
      chart("losses", [["padding", "padding"], ["host", "waits for host"]], percent),
    ];
    this.spokenAt = 0;
    this.drawWanted = false;
    new ResizeObserver(() => this.redraw()).observe($("batch"));
    $("lanes").parentElement.addEventListener("scroll", () => this.redraw({ charts: false }), { passive: true });
    this.redraw();
  }

  hello(info) {
    this.info = info;
    this.blocks.size(info.num_blocks);
    const name = document.createElement("b");
    name.textContent = info.model.split("/").pop();
    $("model").replaceChildren(name, ` · ${info.device} · ${info.dtype} · context ${count(info.max_model_len)}`);
    $("model").title = info.model;
    this.redraw();
  }

  #showNumbers(frame) {
    const { numbers } = frame;
    if (numbers.draining) this.#showHealth("busy", "restarting");
    else this.#showHealth("good", "serving");
    this.#showLost(null);
    this.#showTiles(numbers);
    this.#showStep(frame.columns.at(-1), numbers);
    this.#showHandovers();
    this.#showQueue(frame.waiting, numbers.num_waiting);
    this.#showBlockText(numbers);
    if (frame.advice) this.#showAdvice(frame.advice);
  }

  frame(frame) {
    const numbers = frame.numbers;
    if (this.replicas.show(frame)) this.#startAnew();
    const isNewPoint = this.series.add(frame.at_s, numbers);
    this.lanes.add(frame, this.series.rate("steps"));
    if (frame.rows.some((row) => /[ar]/.test(row[7]))) {
      for (const entry of document.querySelectorAll(".k-guess")) entry.hidden = false;
    }
    this.blocks.add(frame);
    if (numbers.num_used_blocks === 0 && numbers.num_cached_blocks === 0) this.blocks.clear();
    this.restart.note(numbers.draining);
    if (numbers.ok || numbers.draining) this.#showNumbers(frame);
    else this.#lose({ health: numbers.reason || "not ready", title: `${this.replicas.name ?? "The engine"} is not available.`, text: numbers.reason });
    this.#speak();
    this.redraw({ charts: isNewPoint });
  }

  /** Frames are of another replica. */
  #startAnew() {
    this.series = new Series();
    this.lanes.clear();
    this.blocks.map = null;
    if (this.info) this.blocks.size(this.info.num_blocks);
  }

  /** The chat on this page has sent a request, or will get no more of it. */
  expect(isAwaited) {
    this.lanes.expect(isAwaited);
    this.redraw({ charts: false });
  }

  /** A request of the chat on this page. */
  claim(id) {
    this.lanes.claim(id);
    this.redraw({ charts: false });
  }

  /** There is no connection. */
  trouble({ isRefused, isRestarting, text }) {
    if (isRestarting) this.restart.note(true);
    this.series.lose();
    this.blocks.clear();
    this.replicas.lose();
    if (isRefused) this.#lose({ health: "no access", title: "The server does not let this page in.", text });
    else if (this.restart.isUnderWay) this.#lose({ state: "busy", health: "restarting", title: "The server is restarting.", text: "Trying again by itself." });
    else this.#lose({ health: "lost", title: "The server is lost.", text: `${text} Trying again by itself.` });
    this.redraw();
  }

  /** What was last known is no longer so: it is not shown. */
  #lose({ state = "bad", health, title, text }) {
    this.#showHealth(state, health);
    this.#showLost({ state, title, text });
    this.lanes.clear();
    for (const tile of $("tiles").querySelectorAll("[id]")) setText(tile, "–");
    for (const id of ["queue-text", "blocks-text", "budget-text", "lanes-text"]) setText($(id), "–");
    for (const bar of $("budget").children) bar.style.width = "0";
    this.queueSignature = this.adviceSignature = null;
    $("queue").replaceChildren();
    $("advice").replaceChildren();
    this.spokenAt = 0;
    this.#speak();
  }

  #showLost(lost) {
    $("lost").hidden = lost === null;
    $("batch").classList.toggle("stale", lost !== null);
    $("model").classList.toggle("stale", lost !== null);
    if (lost === null) return;
    $("lost").dataset.state = lost.state;
    setText($("lost-title"), lost.title);
    setText($("lost-text"), lost.text);
  }

  /** At most once per picture of the screen. */
  redraw({ charts = true, colours = false } = {}) {
    if (colours) forgetColours();
    this.chartsWanted ||= charts;
    if (this.drawWanted) return;
    this.drawWanted = true;
    requestAnimationFrame(() => {
      this.drawWanted = false;
      $("how").hidden = !this.lanes.isEmpty;
      this.lanes.draw($("lanes").parentElement.scrollTop);
      this.blocks.draw();
      if (this.chartsWanted) for (const each of this.charts) each.draw(this.series.points);
      this.chartsWanted = false;
    });
  }

  #showHealth(state, text) {
    $("health").dataset.state = state;
    setText($("health").lastElementChild, text);
  }

  #showTiles(numbers) {
    const share = this.info ? numbers.num_used_blocks / this.info.num_blocks : null;
    setText($("n-output"), rate(this.series.rate("output")));
    setText($("n-prompt"), rate(this.series.rate("prompt")));
    setText($("n-running"), count(numbers.num_running));
    setText($("n-waiting"), count(numbers.num_waiting));
    setText($("n-ttft"), ms(numbers.ttft_p50_ms));
    setText($("n-itl"), msPair(numbers.itl_p50_ms, numbers.itl_p99_ms));
    setText($("n-kv"), percent(share));
    setText($("n-hits"), percent(numbers.hit_rate));
    setText($("n-preempt"), count(numbers.num_preemptions));
    const { bandwidth, compute, padding, host, nvml } = this.series.shares();
    setText($("n-use"), bandwidth == null ? "–" : `${percent(bandwidth)} / ${percent(compute)}`);
    setText($("n-useful"), percent(padding == null ? null : 1 - padding));
    setText($("n-host"), percent(host));
    setText($("n-nvml"), percent(nvml));
    this.#showPrices(numbers.prices);
  }

  /** Without the price of a device there are none, and no tiles for them. */
  #showPrices(prices) {
    for (const tile of document.querySelectorAll(".tiles .price")) tile.hidden = !prices;
    if (!prices) return;
    setText($("n-price-recent"), pricePair(prices.recent_input, prices.recent_output));
    setText($("n-price"), pricePair(prices.input, prices.output));
  }

  #showStep(column, numbers) {
    if (!column && numbers.num_running > 0) return;
    const [decodes, chunked, stepMs] = column ?? [0, 0, null];
    const budget = Math.max(this.info?.max_num_batched_tokens ?? 1, decodes + chunked);
    const [decodeBar, chunkBar] = $("budget").children;
    decodeBar.style.width = `${(100 * decodes) / budget}%`;
    chunkBar.style.width = `${(100 * chunked) / budget}%`;
    const isIdle = numbers.num_running === 0 && numbers.num_waiting === 0;
    setText($("budget-text"), isIdle ? "asleep" : `${decodes} decode + ${chunked} prompt tokens · ${ms(stepMs)}`);
  }

  #showHandovers() {
    const { handovers } = this.lanes;
    const passed = `${plural(handovers, "seat")} passed on while others kept running`;
    setText($("lanes-text"), handovers > 0 ? passed : "a row per seat, a column per step");
  }

  #showQueue(waiting, total) {
    setText($("queue-text"), total === 0 ? "empty" : plural(total, "request"));
    const items = total === 0 ? [] : waiting.map(([number, tokens]) => [`#${number + 1}`, tokens]);
    const signature = items.join();
    if (signature === this.queueSignature) return;
    this.queueSignature = signature;
    $("queue").replaceChildren(...items.map(([name, tokens]) => {
      const item = document.createElement("li");
      item.textContent = `${name} · ${count(tokens)} in`;
      return item;
    }));
  }

  #showBlockText(numbers) {
    if (!this.info) return;
    const { num_used_blocks: used, num_used_slots: slots, num_cached_blocks: cached, num_table_entries: held } = numbers;
    const waste = used > 0 ? Math.max(0, 1 - slots / (used * this.info.block_size)) : 0;
    const parts = [`${count(used)} of ${count(this.info.num_blocks)} in use`];
    if (cached > 0) parts.push(`${count(cached)} cached`);
    if (numbers.num_host_blocks > 0) parts.push(`${count(numbers.num_host_blocks)} on the host`);
    if (held > used) parts.push(`${(held / used).toFixed(1)} requests per block`);
    if (used > 0) parts.push(`${percent(waste)} empty`);
    const perCell = this.blocks.map?.blocks_per_cell ?? 1;
    if (perCell > 1) parts.push(`a cell is ${perCell} blocks`);
    setText($("blocks-text"), parts.join(" · "));
  }

  #showAdvice({ level, title, text }) {
    const signature = level + title + text;
    if (signature === this.adviceSignature) return;
    this.adviceSignature = signature;
    const item = document.createElement("li");
    item.dataset.level = level;
    const head = document.createElement("b");
    head.textContent = title;
    item.append(head, ` ${text}`);
    $("advice").replaceChildren(item);
  }

  /** Pictures tell their content in words, now and then. */
  #speak() {
    const now = performance.now();
    if (now - this.spokenAt < SPOKEN_EVERY_MS) return;
    this.spokenAt = now;
    $("lanes").setAttribute("aria-label", this.lanes.describe());
    $("blocks").setAttribute("aria-label", `KV cache: ${$("blocks-text").textContent}`);
  }
}

function chart(name, series, format) {
  return new Chart($(`c-${name}`), $(`v-${name}`), { series: series.map(([key, label]) => ({ key, label })), format });
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
