// Both pools: sizes with their resize, the autoscaler's reason, and a row for each instance.

import { Views, el, setAttribute, setText, table } from "./dom.js";
import { bytesPerSecond, milliseconds, number, perSecond, percent } from "./format.js";

const CONFIRM_MS = 4000;
const byName = new Intl.Collator("en", { numeric: true });
const KV_CLASSES = ["running", "held", "pinned", "cached"];

const COLUMNS = (role) => [
  ["instance", "name"],
  ["state", ""],
  ["running", "num", "requests in the engine's steps, of its slots"],
  ["waiting", "num", "requests that wait for their first step"],
  ["tok/s", "num", role === "prefill" ? "prompt tokens computed per second, now" : "tokens generated per second, now"],
  ["step", "num extra", "time of an engine's step"],
  ["KV", "kv", "blocks of running requests, held for readers, pinned, cached"],
  ["hits", "num", "prompt tokens found in the prefix cache, of the last minute's"],
  role === "prefill" ? ["speed", "num extra", "while it computes, tokens/s"] : ["hand-over", "num extra", "speed at which KV reaches it"],
  ["", "num"],
];

class Instance {
  #cells;
  #bar;
  #part;

  constructor(role, drain) {
    this.role = role;
    this.#bar = KV_CLASSES.map((kind) => el("i", { class: `kv-${kind}` }));
    this.#part = el("span", { class: "kv-part" });
    this.#cells = COLUMNS(role).map(([, kind]) => el(kind === "name" ? "th" : "td", { class: kind, scope: kind === "name" ? "row" : undefined }));
    this.state = el("span", { class: "state" });
    this.#cells[1].append(this.state);
    this.#cells[6].append(el("span", { class: "kv-bar", role: "img" }, ...this.#bar), this.#part);
    this.drain = confirmed("Drain", () => drain(this.address));
    this.#cells[9].append(this.drain.button);
    this.node = el("tbody", {}, el("tr", {}, ...this.#cells));
  }

  update([address, one]) {
    this.address = address;
    const kv = one.kv ?? { blocks: 0, free: 0, cached: 0, held: 0, pinned: 0 };
    const isPrefill = this.role === "prefill";
    const texts = [
      one.name, null,
      one.running === undefined ? "–" : `${one.running + one.loading} / ${one.slots}`,
      number(one.waiting),
      perSecond(isPrefill ? one.prefill_tokens_per_s : one.tokens_per_s),
      milliseconds(one.step_ms), null,
      percent(one.hit_rate),
      isPrefill ? perSecond(one.prefill_speed) : bytesPerSecond(one.hand_over_bytes_per_s),
    ];
    texts.forEach((text, index) => text !== null && setText(this.#cells[index], text));
    setAttribute(this.#cells[0], "title", one.dtype ? `${address}, ${one.dtype}` : address);
    setText(this.state, one.silent_s ? `${one.state} ${one.silent_s.toFixed(0)} s` : one.state);
    setAttribute(this.state, "data-state", one.state);
    setAttribute(this.state, "title", one.out ?? "");
    this.#showBlocks(kv);
    this.drain.button.disabled = one.state !== "ready" && one.state !== "ejected";
    this.drain.describe(one.name);
  }

  #showBlocks(kv) {
    const all = Math.max(kv.blocks, 1);
    const running = Math.max(kv.blocks - kv.free - kv.cached - kv.held - kv.pinned, 0);
    const parts = { ...kv, running };
    KV_CLASSES.forEach((kind, index) => { this.#bar[index].style.width = `${(100 * parts[kind]) / all}%`; });
    setText(this.#part, kv.blocks ? percent((kv.blocks - kv.free - kv.cached) / all) : "–");
    const title = KV_CLASSES.map((kind) => `${kind} ${parts[kind]}`).join(", ");
    setAttribute(this.#bar[0].parentNode, "aria-label", `${title}, of ${kv.blocks} blocks`);
    setAttribute(this.#bar[0].parentNode, "title", `${title}, free ${kv.free}, of ${kv.blocks} blocks`);
  }
}

/** A button that asks once more before it acts; `describe(subject)` names what it acts on. */
function confirmed(text, act) {
  let timer;
  let subject = "";
  const isSure = () => button.classList.contains("sure");
  const describe = (name) => {
    subject = name;
    setAttribute(button, "aria-label", `${isSure() ? "Sure? " : ""}${text} ${subject}`);
  };
  const ask = (isAsked) => {
    clearTimeout(timer);
    if (isAsked) timer = setTimeout(ask, CONFIRM_MS, false);
    button.classList.toggle("sure", isAsked);
    setText(button, isAsked ? "Sure?" : text);
    describe(subject);
  };
  const button = el("button", { type: "button", class: "small", click: () => {
    const acts = isSure();
    ask(!acts);
    if (acts) act();
  } }, text);
  return { button, describe };
}

class Pool {
  #rows;
  #table;
  #count = el("span", { class: "muted" });
  #why = el("p", { class: "why" });
  #size;
  #button;
  #form;
  #wanted;

  constructor(role, calls) {
    const title = `${role[0].toUpperCase()}${role.slice(1)} pool`;
    this.role = role;
    this.#table = table(COLUMNS(role), role === "prefill" ? "No instance: decode instances compute the prompts." : "No instance is known.");
    this.#rows = new Views(this.#table.node, () => new Instance(role, calls.drain));
    this.#size = el("input", { type: "number", min: role === "decode" ? 1 : 0, max: 64, "aria-label": `Size of the ${role} pool`, input: () => this.#edited() });
    this.#button = el("button", { class: "small", disabled: true }, "Resize");
    this.#form = el("form", { class: "size", hidden: true, submit: (event) => {
      event.preventDefault();
      calls.resize({ [role]: this.#size.valueAsNumber });
    } }, this.#size, this.#button);
    const head = el("header", {}, el("h2", {}, title), this.#count, this.#form);
    this.node = el("div", { class: "card", "data-pool": role }, head, this.#why, el("div", { class: "scroll" }, this.#table.node));
  }

  #edited() {
    this.#button.disabled = !this.#size.validity.valid || Number.isNaN(this.#size.valueAsNumber) || this.#size.valueAsNumber === this.#wanted;
  }

  update(pool, instances, isResizable) {
    const size = pool.size === undefined ? instances.length : pool.size;
    setText(this.#count, `${pool.ready} of ${size} ready`);
    const bounds = pool.min === undefined ? "" : `autoscaler ${pool.min}–${pool.max}${pool.hold ? `, ${pool.hold.replaceAll("_", " ")}` : ""}: `;
    setText(this.#why, pool.reason ? bounds + pool.reason : "");
    this.#form.hidden = !isResizable || pool.size === undefined;
    const isTyping = this.#form.contains(document.activeElement) && this.#size.value !== String(this.#wanted ?? "");
    if (pool.size !== this.#wanted && !isTyping) this.#size.value = pool.size ?? "";
    this.#wanted = pool.size;
    this.#edited();
    this.#table.isEmpty(!instances.length);
    this.#rows.update(instances.map((entry) => [entry[0], entry]));
  }
}

export class Pools {
  #pools;

  /** `calls`: resize({pool: size}) and drain(address). */
  constructor(parent, calls) {
    this.#pools = ["prefill", "decode"].map((role) => new Pool(role, calls));
    parent.append(...this.#pools.map((pool) => pool.node));
  }

  /** Each shows one pool of a state. */
  get parts() {
    return this.#pools.map((pool) => (state) => {
      const instances = Object.entries(state.instances).filter(([, one]) => one.role === pool.role);
      instances.sort(([, one], [, other]) => byName.compare(one.name, other.name));
      pool.update(state.pools[pool.role], instances, state.router.resizable);
    });
  }
}
