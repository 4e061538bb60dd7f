// Number formats: the browser's copy of dashboard/presentation/formats.py. A browser test compares
// both on the same values. Unknown is an en dash, never 0.

export const UNKNOWN = "–";

/** Numbers from this size are written with an exponent. */
const HUGE = 1e18;

const known = (value) => typeof value === "number" && Number.isFinite(value);

function three(value) {
  const magnitude = Math.abs(value);
  return magnitude < 9.995
    ? value.toFixed(2)
    : magnitude < 99.95
      ? value.toFixed(1)
      : value.toFixed(0);
}

const grouped = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });

/** All digits. */
export const whole = (value) => grouped.format(value);

export function count(value) {
  if (!known(value)) return UNKNOWN;
  const magnitude = Math.abs(value);
  if (magnitude < 10_000) return grouped.format(value);
  if (magnitude >= HUGE) return value.toExponential(2);
  for (const [size, suffix] of [
    [1e12, "T"],
    [1e9, "B"],
    [1e6, "M"],
    [1e3, "k"],
  ]) {
    if (magnitude >= size * 0.9995) return three(value / size) + suffix;
  }
  return grouped.format(value);
}

export function size(value) {
  if (!known(value)) return UNKNOWN;
  if (Math.abs(value) >= HUGE) return `${value.toExponential(2)} B`;
  for (const [unit, suffix] of [
    [1e15, "PB"],
    [1e12, "TB"],
    [1e9, "GB"],
    [1e6, "MB"],
    [1e3, "kB"],
  ]) {
    if (Math.abs(value) >= unit * 0.9995) return `${three(value / unit)} ${suffix}`;
  }
  return `${value.toFixed(0)} B`;
}

export function loss(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (!Number.isFinite(value)) return Number.isNaN(value) ? "NaN" : "∞";
  return Math.abs(value) < 100 ? value.toFixed(3) : count(value);
}

const two = (value) => String(value).padStart(2, "0");

export function duration(value) {
  if (!known(value)) return UNKNOWN;
  value = Math.max(value, 0);
  if (value >= HUGE) return `${value.toExponential(2)} s`;
  if (value < 0.0995) return `${(value * 1000).toFixed(0)} ms`;
  if (value < 9.95) return `${value.toFixed(value < 0.995 ? 2 : 1)} s`;
  const whole = Math.floor(value + 0.5);
  if (whole < 60) return `${whole} s`;
  const minutes = Math.floor(whole / 60);
  if (minutes < 60) return `${minutes}m ${two(whole % 60)}s`;
  const hours = Math.floor(minutes / 60);
  if (hours < 24) return `${hours}h ${two(minutes % 60)}m`;
  return `${Math.floor(hours / 24)}d ${two(hours % 24)}h`;
}

/** `duration` without fractions of seconds, for running clocks. */
export function elapsed(value) {
  if (!known(value)) return UNKNOWN;
  const whole = Math.max(0, Math.floor(value));
  return whole < 60 ? `${whole} s` : duration(whole);
}

export function age(value) {
  if (!known(value)) return UNKNOWN;
  if (value < 2) return "now";
  if (value >= HUGE) return `${value.toExponential(2)} s`;
  for (const [unit, suffix] of [
    [86_400, "d"],
    [3600, "h"],
    [60, "min"],
  ]) {
    if (value >= unit) return `${Math.floor(value / unit)} ${suffix}`;
  }
  return `${Math.floor(value)} s`;
}

export const ago = (value) => (value < 2 ? "just now" : `${age(value)} ago`);

export function percent(value) {
  if (!known(value)) return UNKNOWN;
  if (Math.abs(value) >= HUGE) return `${value.toExponential(2)} x`;
  return `${(value * 100).toFixed(Math.abs(value) < 0.0995 ? 1 : 0)}%`;
}

/** US dollars. An unknown amount is "unknown": a dash could be read as zero. */
export function money(value) {
  if (!known(value)) return "unknown";
  if (value > 0 && value < 0.005) return "<$0.01";
  return Math.abs(value) < 999.995 ? `$${value.toFixed(2)}` : `$${count(value)}`;
}

/** A sum of money. "+" marks one without the jobs whose price is unknown. */
export function spent(value, isKnown) {
  if (isKnown) return money(value);
  return value ? `${money(value)} +` : "unknown";
}

/** Dollars an hour of the running jobs; a dash if there are none. */
export const rate = (usd_h, isKnown) => (isKnown && !usd_h ? UNKNOWN : spent(usd_h, isKnown));

/** A short number for an axis or a norm: four significant digits, exponent when very small. */
export function short(value) {
  if (!known(value)) return UNKNOWN;
  if (value === 0) return "0";
  const magnitude = Math.abs(value);
  if (magnitude >= 10_000) return count(value);
  if (magnitude < 0.001) return value.toExponential(2);
  return String(Number(value.toPrecision(4)));
}

/** Tick labels of an axis: `text` of each; where two would be equal, all of them with as
 * many digits as the step from one to the next needs. */
export function axis(ticks, text) {
  const texts = ticks.map((tick) => (tick === null ? "" : text(Number(tick.toPrecision(12)))));
  const shown = texts.filter(Boolean);
  if (new Set(shown).size === shown.length) return texts;
  const places = ticks.filter((tick) => tick !== null);
  const step = Math.min(...places.slice(1).map((tick, i) => tick - places[i]));
  return texts.map((one, i) => (one ? finer(ticks[i], one, step) : one));
}

/** "20.1k" of 20,120 in steps of 20: "20.12k"; a duration of two units: as a clock. */
function finer(value, text, step) {
  const [, number, unit] = /^(-?[\d,.]+)(e.*|\D*)$/.exec(text) ?? [];
  const shown = Number(number?.replaceAll(",", ""));
  if (shown === 0) return text;
  const scale = number ? 10 ** Math.round(Math.log10(value / shown)) : 1;
  const digits = Math.min(Math.max(Math.ceil(-Math.log10(step / scale) - 1e-9), 0), 12);
  const fixed = (n) =>
    n.toLocaleString("en-US", { minimumFractionDigits: digits, maximumFractionDigits: digits });
  if (number) return fixed(value / scale) + unit;
  const [hours, minutes] = [Math.floor(value / 3600), Math.floor(value / 60) % 60];
  const seconds = fixed(value % 60).padStart(digits ? digits + 3 : 2, "0");
  return `${hours}:${two(minutes)}:${seconds}`;
}

/** Times in the zone of the browser; an invalid one is unknown. */
const DAY = { month: "short", day: "numeric" };
const MINUTES = { hour: "2-digit", minute: "2-digit", hourCycle: "h23" };
const SECONDS = { ...MINUTES, second: "2-digit" };
const writers = new Map();
function written(time, options) {
  const date = new Date(time ?? NaN);
  if (Number.isNaN(date.getTime())) return UNKNOWN;
  const name = Object.entries(options).join();
  if (!writers.has(name)) writers.set(name, new Intl.DateTimeFormat([], options));
  return writers.get(name).format(date);
}

/** Date, time of day and zone. */
export const when = (time) =>
  written(time, { year: "numeric", ...DAY, ...SECONDS, timeZoneName: "short" });

const dayOf = (time) => new Date(time).toDateString();

/** The time of day if it is today, else also the date, and no seconds unless `seconds`. */
export function clock(time, { seconds = false } = {}) {
  const today = dayOf(time ?? NaN) === dayOf(Date.now());
  return written(time, { ...(today ? {} : DAY), ...(today || seconds ? SECONDS : MINUTES) });
}

/** The name of the browser's zone, such as "GMT+1". */
export const zone = () => when(0).split(" ").at(-1);

/** Labels of an axis of times, given in seconds. The first tick of a day has the date, where ticks
 * are of several days or of another day than today; at midnight it has nothing else. */
export function timeTicks(ticks) {
  const dated = new Set([...ticks.map((s) => dayOf(s * 1000)), dayOf(Date.now())]).size > 1;
  const whole = (s, unit) => Math.abs(s / unit - Math.round(s / unit)) < 1e-6;
  const ofDay = ticks.every((s) => whole(s, 60)) ? MINUTES : SECONDS;
  return ticks.map((s, i) => {
    const isNew = dated && (i === 0 || dayOf(s * 1000) !== dayOf(ticks[i - 1] * 1000));
    const atMidnight = written(s * 1000, SECONDS) === "00:00:00";
    return written(s * 1000, isNew ? (atMidnight ? DAY : { ...DAY, ...ofDay }) : ofDay);
  });
}

export const secondsSince = (iso) =>
  iso ? Math.max(0, (Date.now() - Date.parse(iso)) / 1000) : null;

export const plural = (n, word) => `${count(n)} ${word}${n === 1 ? "" : "s"}`;

/** As in `presentation/formats.py`. */
export function inShort(reason) {
  const [head, ...log] = reason.split(" Last lines of its log:");
  const last = log.join(" ").trim().split("\n").at(-1).trim();
  return last ? `${head} ${last}` : reason;
}
