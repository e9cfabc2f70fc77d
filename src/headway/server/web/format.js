// Numbers for people: few digits, always the same width class, never "NaN".

export function count(value) {
  if (value == null) return "–";
  if (value >= 1e6) return `${(value / 1e6).toFixed(1)}M`;
  if (value >= 1e4) return `${(value / 1e3).toFixed(1)}k`;
  return Math.round(value).toLocaleString("en");
}

export function rate(value) {
  if (value == null) return "–";
  return value > 0 && value < 10 ? value.toFixed(1) : count(value);
}

export function ms(value) {
  if (value == null) return "–";
  if (value >= 1000) return `${(value / 1000).toFixed(value >= 10000 ? 0 : 1)} s`;
  return `${value < 10 ? value.toFixed(1) : Math.round(value)} ms`;
}

/** Two times with one unit, where they share it. */
export function msPair(low, high) {
  if (low == null || high == null) return "–";
  if (low >= 1000 || high >= 1000) return `${ms(low)} / ${ms(high)}`;
  return `${ms(low).replace(" ms", "")} / ${ms(high)}`;
}

export const percent = (share) => (share == null ? "–" : `${Math.round(share * 100)}%`);

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** A price with three significant digits, so that cheap tokens are not free. */
export function price(value) {
  if (value == null) return "–";
  if (value >= 100) return count(value);
  return value > 0 ? value.toFixed(Math.min(8, Math.max(2, 2 - Math.floor(Math.log10(value))))) : "0";
}

export const pricePair = (input, output) => (input == null && output == null ? "–" : `${price(input)} / ${price(output)}`);
