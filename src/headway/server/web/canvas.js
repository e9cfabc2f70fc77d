// What all drawings share: sharp pixels, colours from the style sheet, one redraw per frame.

let palette = null;

/** Colours of the present theme, by the name of their CSS variable. */
export function colours() {
  if (palette === null) {
    const style = getComputedStyle(document.documentElement);
    const names = ["chunk", "reused", "decode", "preempted", "idle", "cached", "free", "text", "dim", "line", "sunken", "series-1", "series-2", "own"];
    palette = Object.fromEntries(names.map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    palette.ownerLight = style.getPropertyValue("--owner-light").trim();
    palette.ownerSat = style.getPropertyValue("--owner-sat").trim();
    palette.owners = new Map();
  }
  return palette;
}

/** To be called after the theme has changed. */
export function forgetColours() {
  palette = null;
}

/** A request's colour: neighbours in number are far apart in hue, and none is as violet as what is used twice. */
export function ownerColour(number) {
  const { owners, ownerSat, ownerLight } = colours();
  const turn = (number * 0.381966 * 285) % 285;
  const hue = Math.round(turn < 225 ? turn : turn + 75);
  if (!owners.has(hue)) owners.set(hue, `hsl(${hue} ${ownerSat} ${ownerLight})`);
  return owners.get(hue);
}

/** Fits the canvas to its box (or to a height) and returns a cleared context in CSS pixels; null while it is hidden. */
export function prepare(canvas, height = canvas.clientHeight) {
  const width = canvas.clientWidth;
  if (width === 0 || height === 0) return null;
  const scale = Math.min(window.devicePixelRatio || 1, 3);
  const [w, h] = [Math.round(width * scale), Math.round(height * scale)];
  if (canvas.width !== w || canvas.height !== h) {
    canvas.width = w;
    canvas.height = h;
    if (canvas.clientHeight !== height) canvas.style.height = `${height}px`;
  }
  const context = canvas.getContext("2d");
  context.setTransform(scale, 0, 0, scale, 0, 0);
  context.clearRect(0, 0, width, height);
  return { context, width, height };
}

export const FONT = "12px system-ui, -apple-system, 'Segoe UI', Roboto, 'Noto Sans', sans-serif";
