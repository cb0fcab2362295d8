// The last minutes, five at most, as four charts by uPlot, with one cursor; the figures beside the titles follow it.

import { el, setText } from "./dom.js";
import { milliseconds, number, perSecond } from "./format.js";

const HISTORY_S = 300;
const SHORTEST_S = 60; // of a router that has just started
const BRIDGED_S = 4;
const HEIGHT = 116;

const CHARTS = [
  { title: "TTFT", about: "time to first token", format: milliseconds, series: [["p50", "ttft_p50_ms", "--a"], ["p95", "ttft_p95_ms", "--b"]] },
  { title: "ITL", about: "inter-token latency: each request's mean gap between tokens within a second", format: milliseconds, series: [["p50", "itl_p50_ms", "--a"], ["p95", "itl_p95_ms", "--b"]] },
  { title: "Tokens/s", about: "output tokens of all requests", format: perSecond, series: [["now", "tokens_per_s", "--c", true]] },
  { title: "Requests", about: "in the router", format: number, series: [["running", "running", "--a", true], ["queued", "queued", "--b"]] },
];

/** The indices of the values that no line reaches: lines join neighbours, and bridge BRIDGED_S of missing values (null). */
export function isolated(seconds, values) {
  const known = [...values.keys()].filter((index) => values[index] !== null);
  const isJoined = (one, other) => other === one + 1 || seconds[other] - seconds[one] <= BRIDGED_S;
  return known.filter((index, place) =>
    !(place > 0 && isJoined(known[place - 1], index)) && !(place + 1 < known.length && isJoined(index, known[place + 1])));
}

/** An axis' value: without needless decimals. */
const tick = (value, format) => (value ? format(value).replace(/\.0+(?!\d)/, "") : "0");
const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

class Chart {
  #plot;
  #figures;
  #data;
  #holder = el("div", { class: "plot" });

  constructor(spec) {
    this.spec = spec;
    this.#data = [[], ...spec.series.map(() => [])];
    this.#figures = spec.series.map(() => el("b"));
    const legend = spec.series.map(([name, , variable], index) =>
      el("span", { class: "key", "data-color": variable }, ...(name ? [`${name} `] : []), this.#figures[index]));
    this.node = el("figure", { class: "card chart" }, el("figcaption", {}, el("h2", { title: spec.about }, spec.title), el("span", { class: "keys" }, ...legend)), this.#holder);
    new ResizeObserver(() => this.#plot?.setSize(this.#size())).observe(this.#holder);
  }

  /** Draws again, in the colors of the present theme. */
  draw() {
    this.#plot?.destroy();
    this.#plot = new uPlot(this.#options(), this.#data, this.#holder);
  }

  update(seconds, points) {
    this.#data = [seconds, ...this.spec.series.map(([, member]) => points.map((point) => point[member] ?? null))];
    this.#plot.setData(this.#data);
    this.#show(this.#plot.cursor.idx);
  }

  /** The figures at `index`; without one the last that are known. */
  #show(index) {
    this.#figures.forEach((figure, place) => {
      const values = this.#data[place + 1];
      const last = index ?? values.findLastIndex((value) => value !== null);
      setText(figure, this.spec.format(values[last] ?? undefined));
    });
  }

  #size() {
    return { width: Math.max(this.#holder.clientWidth, 80), height: HEIGHT };
  }

  #options() {
    const axis = { stroke: color("--muted"), grid: { stroke: color("--grid"), width: 1 }, ticks: { show: false }, font: "11px system-ui" };
    const bridged = (plot, series, from, to, gaps) => {
      const most = (plot.valToPos(BRIDGED_S, "x", true) - plot.valToPos(0, "x", true));
      return gaps.filter(([start, end]) => end - start > most + 1); // its ends are rounded to pixels
    };
    return {
      ...this.#size(),
      legend: { show: false },
      cursor: { y: false, points: { size: 6 }, drag: { x: false }, sync: { key: "live" } },
      padding: [8, 16, 0, 0], // half of a time fits beside the last point
      scales: { x: { time: true }, y: { range: (plot, low, high) => [0, high > 0 ? high * 1.1 : 1] } },
      axes: [
        { ...axis, grid: { show: false }, size: 22, space: 46, incrs: [60, 120, 300], values: "{HH}:{mm}" },
        { ...axis, size: 52, space: 30, values: (plot, values) => values.map((value) => tick(value, this.spec.format)) },
      ],
      series: [{}, ...this.spec.series.map(([, , variable, isArea]) => ({
        stroke: color(variable),
        fill: isArea ? `${color(variable)}26` : undefined,
        width: 1.5,
        points: { size: 3, filter: (plot, place, areAllShown) => (areAllShown ? null : isolated(plot.data[0], plot.data[place])) },
        gaps: bridged,
      }))],
      hooks: { setCursor: [(plot) => this.#show(plot.cursor.idx)] },
    };
  }
}

export class Charts {
  #charts = CHARTS.map((spec) => new Chart(spec));
  #at;
  #shown; // seconds and points of the state at #at

  constructor(parent) {
    parent.append(...this.#charts.map((chart) => chart.node));
    const draw = () => this.#charts.forEach((chart) => chart.draw());
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
    draw();
  }

  /** Each shows one chart of a state. */
  get parts() {
    return this.#charts.map((chart) => (state) => chart.update(...this.#columns(state)));
  }

  #columns(state) {
    if (state.at === this.#at) return this.#shown;
    this.#at = state.at;
    const now = Math.floor(state.at);
    const known = Object.keys(state.points).map(Number).sort((a, b) => a - b);
    const first = known.find((second) => second > now - HISTORY_S) ?? now;
    const begin = Math.max(now - HISTORY_S, Math.min(first, now - SHORTEST_S));
    const seconds = [begin, ...known.filter((second) => second > begin), now];
    this.#shown = [seconds, seconds.map((second) => state.points[second] ?? {})];
    return this.#shown;
  }
}
