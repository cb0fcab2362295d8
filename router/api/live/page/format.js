// Numbers as text, with units; "–" for what is unknown.

const UNKNOWN = "–";
const whole = new Intl.NumberFormat("en", { maximumFractionDigits: 0 });

const digits = (value, most) => value.toFixed(value >= 100 ? 0 : Math.min(most, value >= 10 ? 1 : 2));

export const number = (value) => (value === undefined || value === null ? UNKNOWN : whole.format(value));
export const percent = (part) => (part === undefined ? UNKNOWN : `${Math.round(part * 100)} %`);

export function milliseconds(value) {
  if (value === undefined || value === null) return UNKNOWN;
  return value >= 1000 ? `${digits(value / 1000, 2)} s` : `${digits(value, 1)} ms`;
}

export function perSecond(value) {
  if (value === undefined || value === null) return UNKNOWN;
  return value >= 10000 ? `${digits(value / 1000, 1)} k` : value >= 10 ? whole.format(value) : value ? value.toFixed(1) : "0";
}

export function bytesPerSecond(value) {
  if (value === undefined) return UNKNOWN;
  return value >= 1e9 ? `${digits(value / 1e9, 2)} GB/s` : `${digits(value / 1e6, 1)} MB/s`;
}

export const clock = (seconds) => new Date(seconds * 1000).toLocaleTimeString("en-GB");

export function age(seconds) {
  const s = Math.max(0, seconds);
  return s < 60 ? `${s.toFixed(1)} s` : `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s`;
}
