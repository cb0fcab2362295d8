// The router's state, followed by server-sent events; docs/live_page.md describes them.
//
//   connecting ──snapshot──▶ live ──ended or silent──▶ lost ──a while──▶ connecting
//        ├──no answer──▶ lost      ├──another answer──▶ refused ──a while──▶ connecting
//        └──401──▶ locked ──another token──▶ connecting      live ──hidden for a while──▶ paused ──shown──▶ connecting
//
// By fetch and not by EventSource, which sends no Authorization header.

const SILENT_MS = 6000;
const HIDDEN_MS = 30000;
const WAITS_MS = [500, 1000, 2000, 4000];

/** An answer that is no stream; its message is the server's. */
class Refusal extends Error {}

/** A JSON merge patch (RFC 7396) applied to an object, in place. */
export function merge(target, patch) {
  for (const [name, value] of Object.entries(patch)) {
    if (value === null) delete target[name];
    else if (typeof value === "object" && !Array.isArray(value)) {
      const old = target[name];
      target[name] = merge(old && typeof old === "object" && !Array.isArray(old) ? old : {}, value);
    } else target[name] = value;
  }
  return target;
}

/** The data of each event of a response, parsed; ends with the stream. */
export async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line.startsWith("data: {")) yield JSON.parse(line.slice("data: ".length));
    }
  }
}

export class Feed {
  #onState;
  #onStatus;
  #state = {};
  #abort = new AbortController();
  #wake = () => {};
  #isHidden = false;

  /** `onState(state)` at each change; `onStatus(status, detail)` with one of the states above. */
  constructor(onState, onStatus) {
    this.#onState = onState;
    this.#onStatus = onStatus;
    let hiding;
    document.addEventListener("visibilitychange", () => {
      clearTimeout(hiding);
      if (document.hidden) hiding = setTimeout(() => this.#hide(true), HIDDEN_MS);
      else this.#hide(false);
    });
  }

  /** Connects again at once, with the present token. */
  reconnect() {
    this.#abort.abort();
    this.#wake();
  }

  /** Follows the router for ever. `headers()` are sent with each connection. */
  async run(headers) {
    for (let failures = 0; ; failures++) {
      if (this.#isHidden) await this.#sleep("paused", "the tab is hidden");
      this.#onStatus("connecting", "");
      const end = await this.#follow(headers()).catch((error) => error);
      const wait = WAITS_MS[Math.min(failures, WAITS_MS.length - 1)];
      if (end === "locked") await this.#sleep("locked", "");
      else if (end === "live") failures = -1;
      else if (end instanceof Refusal) await this.#sleep("refused", end.message, wait);
      else await this.#sleep("lost", end.message ?? end, wait);
    }
  }

  #hide(isHidden) {
    if (isHidden === this.#isHidden) return;
    this.#isHidden = isHidden;
    this.reconnect();
  }

  #sleep(status, detail, milliseconds) {
    this.#onStatus(status, detail);
    return new Promise((resolve) => {
      this.#wake = resolve;
      if (milliseconds !== undefined) setTimeout(resolve, milliseconds);
    });
  }

  /** One connection; returns "locked", "live" if it has been, or throws. */
  async #follow(headers) {
    this.#abort = new AbortController();
    const abort = () => this.#abort.abort();
    let silence = setTimeout(abort, SILENT_MS);
    let status = "";
    try {
      const response = await fetch("live", { headers, cache: "no-store", signal: this.#abort.signal });
      if (response.status === 401) return "locked";
      if (!response.ok) throw new Refusal((await problemOf(response)).message);
      for await (const event of events(response)) {
        clearTimeout(silence);
        silence = setTimeout(abort, SILENT_MS);
        this.#state = event.snapshot ?? merge(this.#state, event.patch);
        if (status !== "live") this.#onStatus((status = "live"), "");
        this.#onState(this.#state);
      }
    } catch (error) {
      if (status !== "live") throw error;
    } finally {
      clearTimeout(silence);
    }
    return status || "ended";
  }
}

/** The error in a response, as {status, message}. */
export async function problemOf(response) {
  const body = await response.json().catch(() => ({}));
  return { status: response.status, message: body.error?.message ?? `HTTP ${response.status}` };
}
