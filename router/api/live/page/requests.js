// Running requests, and ended ones with their stages.

import { Views, byId, el, setAttribute, setText, table } from "./dom.js";
import { age, clock, milliseconds, number } from "./format.js";

export const STAGES = {
  queue: "validation and admission, and pauses for other tenants",
  pick: "choice of the instances",
  reserve: "KV blocks at the decode instance",
  wait: "until the prefill instance has queued it",
  prefill: "until the first token, its queue included",
  hand_over: "KV to the decode instance",
  schedule: "for the decode instance's first step",
  decode: "the other tokens",
};

const label = (stage) => stage.replaceAll("_", " ");
const route = (one) => [...one.prefill, ...one.decode].join(" → ") || "–";

/** A bar of a request's stages, as wide as they are long. */
export function stageBar(stages, whole) {
  const total = Math.max(whole, 0.001);
  const parts = stages.map(([name, ms]) => {
    const part = el("i", { "data-stage": name, title: `${label(name)} ${milliseconds(ms)}` });
    part.style.width = `${(100 * ms) / total}%`;
    return part;
  });
  const about = stages.map(([name, ms]) => `${label(name)} ${milliseconds(ms)}`).join(", ");
  return el("span", { class: "stages", role: "img", "aria-label": about }, ...parts);
}

const RUNNING = [["request", "name"], ["stage", ""], ["for", "num"], ["prompt", "num"], ["tokens", "num"], ["instances", "wide-cell"]];
const ENDED = [["request", "name"], ["at", "num extra"], ["outcome", ""], ["prompt", "num"], ["tokens", "num"], ["TTFT", "num"], ["ITL", "num extra"], ["total", "num"], ["stages", "bar-cell"], ["instances", "wide-cell"]];

const row = (columns) => columns.map(([, kind]) => el(kind === "name" ? "th" : "td", { class: kind, scope: kind === "name" ? "row" : undefined }));

class Running {
  #cells = row(RUNNING);

  constructor() {
    this.stage = el("span", { class: "chip" });
    this.#cells[1].append(this.stage);
    this.node = el("tbody", {}, el("tr", {}, ...this.#cells));
  }

  update([one, now]) {
    const texts = [one.id || "…", null, age(now - one.at), number(one.prompt_tokens), number(one.tokens), route(one)];
    texts.forEach((text, index) => text !== null && setText(this.#cells[index], text));
    setText(this.stage, label(one.stage));
    setAttribute(this.stage, "data-stage", one.stage);
  }
}

class Ended {
  #cells = row(ENDED);
  #details;

  /** `onToggle(isOpen)`: its details were opened or closed. */
  constructor(one, onToggle) {
    this.onToggle = onToggle;
    const name = el("button", { type: "button", class: "link", "aria-expanded": "false", click: () => this.#toggle() }, one.id || "not valid");
    this.one = one;
    this.button = name;
    const isGood = one.outcome === "finished";
    const texts = [null, clock(one.at), one.outcome, number(one.prompt_tokens), number(one.tokens), milliseconds(one.ttft_ms), milliseconds(one.itl_ms), milliseconds(one.total_ms), null, route(one)];
    texts.forEach((text, index) => text !== null && (this.#cells[index].textContent = text));
    if (!isGood) this.#cells[2].classList.add(one.outcome === "aborted" ? "warn" : "bad");
    this.#cells[0].append(name);
    this.#cells[8].append(stageBar(one.stages, one.total_ms));
    this.node = el("tbody", {}, el("tr", {}, ...this.#cells));
  }

  update() {}

  #toggle() {
    if (this.#details) {
      this.#details.remove();
      this.#details = undefined;
    } else {
      this.#details = el("tr", { class: "details" }, el("td", { colspan: ENDED.length }, details(this.one)));
      this.node.append(this.#details);
    }
    setAttribute(this.button, "aria-expanded", String(Boolean(this.#details)));
    this.onToggle(Boolean(this.#details));
  }
}

/** Each stage of a request with its bar where it lies in the whole, then what else is known. */
function details(one) {
  let start = 0;
  const lines = one.stages.map(([name, ms]) => {
    const bar = el("i", { "data-stage": name });
    bar.style.marginInlineStart = `${(100 * start) / Math.max(one.total_ms, 0.001)}%`;
    bar.style.width = `${(100 * ms) / Math.max(one.total_ms, 0.001)}%`;
    start += ms;
    return el("li", {}, el("span", { title: STAGES[name] }, label(name)), el("b", {}, milliseconds(ms)), el("span", { class: "track" }, bar));
  });
  const facts = [
    ["instances", route(one)],
    ["why", one.reason],
    ["cached", one.cached_tokens === undefined ? "" : `${number(one.cached_tokens)} of ${number(one.prompt_tokens)} prompt tokens`],
    ["error", one.error],
  ].filter(([, text]) => text);
  const list = facts.flatMap(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]);
  return el("div", {}, el("ol", { class: "timeline" }, ...lines), el("dl", { class: "facts" }, ...list));
}

export class Requests {
  #running = table(RUNNING, "No request is running.");
  #ended = table(ENDED, "No request has ended yet. Try the chat, or tandem bench serve.");
  #runningRows = new Views(this.#running.node, () => new Running());
  #open = new Map(); // by key, ended requests whose details are open: they stay while others come
  #endedRows = new Views(this.#ended.node, (key, one) => new Ended(one, (isOpen) => {
    if (isOpen) this.#open.set(key, one);
    else this.#open.delete(key);
  }));

  constructor() {
    byId("running").append(this.#running.node);
    byId("ended").append(this.#ended.node);
    byId("stages").append(...Object.entries(STAGES).map(([name, about]) => el("li", { "data-stage": name, title: about }, label(name))));
  }

  /** Each shows one of the lists of a state. */
  get parts() {
    return [(state) => this.#showRunning(state), (state) => this.#showEnded(state)];
  }

  #showRunning(state) {
    const running = Object.entries(state.requests);
    const more = state.router.in_flight + state.router.queued - running.length;
    setText(byId("running-count"), `${number(running.length)}${more > 0 ? ` of ${number(running.length + more)}, the oldest` : ""}`);
    this.#running.isEmpty(!running.length);
    this.#runningRows.update(running.map(([key, one]) => [key, [one, state.at]]));
  }

  #showEnded(state) {
    // Another router, or another process of this one, counts its requests from 1 again.
    const listed = Object.entries(state.ended).map(([number, one]) => [`${state.router.epoch} ${number}`, one]);
    const known = new Set(listed.map(([key]) => key));
    const kept = [...this.#open].filter(([key]) => !known.has(key));
    const ended = [...kept, ...listed.reverse()].sort(([, one], [, other]) => other.at - one.at);
    this.#ended.isEmpty(!ended.length);
    this.#endedRows.update(ended);
  }
}
