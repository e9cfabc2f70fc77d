// Time series over the last minutes: one point a second, one or two lines, a value under the pointer.

import { colours, FONT, prepare } from "./canvas.js";

export const SECONDS = 300;
const SHORTEST = 60;

export class Chart {
  /** `series`: [{key, label}], at most two. `format` turns a value into text. */
  constructor(canvas, value, { series, format }) {
    this.canvas = canvas;
    this.value = value;
    this.series = series;
    this.format = format;
    this.hover = null;
    canvas.addEventListener("pointermove", (event) => this.#point(event));
    canvas.addEventListener("pointerleave", () => this.#point(null));
  }

  /** `points`: one object per second, the newest last. */
  draw(points) {
    this.points = points;
    const area = prepare(this.canvas);
    if (!area) return;
    const { context, width, height } = area;
    const palette = colours();
    const box = { left: 0, top: 8, right: width, bottom: height - 16 };
    const top = niceTop(Math.max(0, ...points.flatMap((point) => this.series.map(({ key }) => point[key] ?? 0))));
    this.span = Math.max(SHORTEST, points.length);
    drawGrid(context, box, { palette, label: this.format(top), span: this.span });
    const xOf = (i) => box.right - ((points.length - 1 - i) * (box.right - box.left)) / (this.span - 1);
    const yOf = (value) => box.bottom - (value / top) * (box.bottom - box.top);
    this.series.forEach(({ key }, index) => {
      drawLine(context, points, key, { xOf, yOf, box, colour: palette[`series-${index + 1}`], fill: index === 0 });
    });
    if (this.hover !== null && this.#pointed()) {
      context.fillStyle = palette.dim;
      context.fillRect(this.hover, box.top, 1, box.bottom - box.top);
    }
    this.#say();
  }

  #point(event) {
    this.hover = event ? event.offsetX : null;
    if (this.points) this.draw(this.points);
  }

  #pointed() {
    const back = Math.round(((this.canvas.clientWidth - this.hover) / this.canvas.clientWidth) * (this.span - 1));
    return this.points.at(-1 - back);
  }

  #say() {
    const point = (this.hover === null ? this.points.at(-1) : this.#pointed()) ?? {};
    const parts = this.series.flatMap(({ key, label }, index) => {
      const mark = document.createElement("i");
      mark.className = `s-${index + 1}`;
      return [mark, `${label} ${this.format(point[key])}`];
    });
    this.value.replaceChildren(...parts);
  }
}

function drawGrid(context, box, { palette, label, span }) {
  context.fillStyle = palette.line;
  for (const y of [box.top, (box.top + box.bottom) / 2, box.bottom]) context.fillRect(box.left, Math.round(y), box.right, 1);
  context.font = FONT.replace("12px", "11px");
  context.fillStyle = palette.dim;
  context.textBaseline = "top";
  context.fillText(label, box.left, box.top + 3);
  context.fillText(span < 120 ? `${span} s ago` : `${Math.round(span / 60)} min ago`, box.left, box.bottom + 4);
  context.textAlign = "right";
  context.fillText("now", box.right, box.bottom + 4);
  context.textAlign = "left";
}

function drawLine(context, points, key, { xOf, yOf, box, colour, fill }) {
  let from = -1;
  for (let i = 0; i <= points.length; i++) {
    const isValue = i < points.length && points[i][key] != null;
    if (isValue && from < 0) from = i;
    if (isValue || from < 0) continue;
    const path = new Path2D();
    for (let j = from; j < i; j++) path.lineTo(xOf(j), yOf(points[j][key]));
    if (i - from === 1) path.lineTo(xOf(from) + 2, yOf(points[from][key]));
    context.strokeStyle = colour;
    context.lineWidth = 1.6;
    context.lineJoin = "round";
    context.stroke(path);
    if (fill) {
      path.lineTo(xOf(i - 1), box.bottom);
      path.lineTo(xOf(from), box.bottom);
      context.globalAlpha = 0.12;
      context.fillStyle = colour;
      context.fill(path);
      context.globalAlpha = 1;
    }
    from = -1;
  }
}

/** The next of 1, 2, 5, 10, ... at or above a value. */
function niceTop(value) {
  if (value <= 1) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((top) => top >= value);
}
