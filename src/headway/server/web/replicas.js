// A button for each replica, with what it has to do; the chosen one is the one that is drawn.

import { count, percent, rate } from "./format.js";
import { Series } from "./series.js";

export class Replicas {
  /** `onChoose(place)` is called when a button is pressed. */
  constructor(row, onChoose) {
    this.row = row;
    this.onChoose = onChoose;
    this.shown = 0;
    this.series = [];
  }

  /** What the one that is shown is called; null if it is the only one. */
  get name() {
    return this.series.length > 1 ? `Replica ${this.shown}` : null;
  }

  /** Takes in a frame; true if it is of another replica than the one before. */
  show({ at_s: at, replica, replicas }) {
    const isOther = replica !== this.shown;
    this.shown = replica;
    if (replicas.length !== this.series.length) this.#build(replicas.length);
    replicas.forEach((load, place) => {
      this.series[place].add(at, load);
      this.#showOne(this.row.children[place], place, load);
    });
    return isOther;
  }

  /** Nothing is known of them. */
  lose() {
    for (const each of this.series) each.lose();
    for (const button of this.row.children) setText(button.lastElementChild, "–");
  }

  #build(number) {
    this.series = Array.from({ length: number }, () => new Series());
    this.row.hidden = number < 2;
    this.row.replaceChildren(...this.series.map((_, place) => {
      const button = document.createElement("button");
      button.type = "button";
      const name = document.createElement("b");
      name.textContent = `Replica ${place}`;
      button.append(name, document.createElement("small"));
      button.addEventListener("click", () => this.onChoose(place));
      return button;
    }));
  }

  #showOne(button, place, load) {
    button.setAttribute("aria-pressed", String(place === this.shown));
    button.dataset.state = load.ok ? "good" : "bad";
    setText(button.firstElementChild, load.role ? `Replica ${place}: ${load.role}` : `Replica ${place}`);
    const share = (blocks) => percent(load.num_blocks ? blocks / load.num_blocks : null);
    const parts = [
      `${count(load.num_running)} running`,
      `${count(load.num_waiting)} waiting`,
      `${rate(this.series[place].rate("output"))}/s`,
      `KV ${share(load.num_used_blocks)}`,
      `${share(load.num_cached_blocks)} cached`,
    ];
    setText(button.lastElementChild, load.ok ? parts.join(" · ") : load.reason);
  }
}

function setText(element, text) {
  if (element.textContent !== text) element.textContent = text;
}
